"""A teacher that is asked while the student learns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from optkit.model.checkpoint import Checkpoint
from optkit.model.mixed_dtypes import computes_in_float32_alone
from optkit.model.skeleton import Skeleton
from optkit.training.logits_in_parts import TwoParts
from optkit.training.losses import divergence
from optkit.training.objective import Targets


class Teacher(Protocol):
    """Whoever says what the student should have said."""

    def targets(self, rows: Sequence[int], tokens: Tensor) -> Targets:
        """Return what it says about int64 [b, s] on the student's device.
        These are the given rows of the data.
        """


class LiveTargets:
    """Hidden states of the teacher; logits are computed for the positions that are asked for."""

    def __init__(self, parts: TwoParts, output: Any) -> None:
        self.parts = parts
        self.last: Tensor = output.last_hidden_state.flatten(0, 1)
        self.hidden_states: Sequence[Tensor] = getattr(output, "hidden_states", None) or ()
        self.attentions: Sequence[Tensor] = getattr(output, "attentions", None) or ()

    @torch.no_grad()
    def logits(self, positions: slice) -> Tensor:
        """Return the teacher's logits, float [positions, v]."""
        return self.parts.logits(self.last[positions][None])[0]

    def divergence(self, logits: Tensor, positions: slice, temperature: float) -> Tensor:
        return divergence(logits, self.logits(positions), temperature)


class LiveTeacher:
    """A model beside the student."""

    def __init__(
        self,
        directory: Path,
        device: str,
        precision: torch.dtype = torch.float32,
        *,
        hidden: bool = False,
        attention: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        """Open a checkpoint in `precision`, or in float32 if its code cannot compute in that.
        `hidden` and `attention` say that these are asked for. Raises SourceError.
        """
        checkpoint = Checkpoint(directory)
        dtype = torch.float32 if computes_in_float32_alone(checkpoint.config) else precision
        skeleton = Skeleton(checkpoint, dtype, "eager" if attention else None, trust_remote_code)
        skeleton.load_("", device)
        self.parts = TwoParts(skeleton.model)
        self.model = self.parts.model
        self.options = {"output_hidden_states": True} if hidden else {}
        self.options |= {"output_attentions": True} if attention else {}

    @property
    def width(self) -> int:
        """Width of its hidden states."""
        return int(self.model.config.get_text_config(decoder=True).hidden_size)

    @torch.no_grad()
    def targets(self, rows: Sequence[int], tokens: Tensor) -> LiveTargets:
        return LiveTargets(self.parts, self.parts.run(tokens, **self.options))
