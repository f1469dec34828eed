"""The place of the texts of a stage or an eval, and the tokenizer that reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from optkit.common.files import object_if_any
from optkit.model.task import positions_of
from optkit.model.text_config import text_config


@dataclass(frozen=True)
class TextPlace:
    """What is known of texts before anything runs."""

    tokenizer: Path
    """A model directory."""
    data: Path | None
    """Directory with local copies of data sets, if the user named one."""
    counts: Path
    """Directory, perhaps not there yet, in which it is remembered how many tokens texts have."""
    trust_remote_code: bool = False
    transformers: bool = False
    """transformers may be imported, to open the tokenizer as the run will."""

    @property
    def positions(self) -> int | None:
        """Longest sequence that the model was built for, in tokens; None if its config.json does not say."""
        return positions_of(object_if_any(self.tokenizer / "config.json"))

    @property
    def vocabulary(self) -> int | None:
        """How many tokens the model knows; None if its config.json does not say."""
        found = text_config(object_if_any(self.tokenizer / "config.json")).get("vocab_size")
        return found if isinstance(found, int) else None
