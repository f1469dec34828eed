"""What stands for a model that nobody can open: its files alone are measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class UnopenedModel:
    """A directory of weights whose code transformers does not have."""

    directory: Path
    device: str
    vocabulary: int = 0
    positions: int = 0
    trust_remote_code: bool = False
    hidden_memory: str = ""
    notes: tuple[str, ...] = ("transformers does not have the model's code: its files alone were measured",)

    def close(self) -> None:
        """Do nothing: nothing was opened."""
