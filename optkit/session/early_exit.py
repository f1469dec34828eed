"""A draft that is the model itself without its last layers.
Proposals cost its first layers and its head, and no memory.

cache     layers 1..N: t0 t1 t2 t3 | p1 p2     the proposals' keys and values,
          the others:  t0 t1 t2 t3               taken out again before the model checks them
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from optkit.errors import OptkitError, SourceError, StageError
from optkit.model.blocks import find_blocks
from optkit.model.carried_state import CarriedState
from optkit.session.speculation import Step
from optkit.session.step_bytes import cache_bytes, weight_bytes


class EarlyExit:
    """Proposes what the model would choose if its norm and head stood behind its first layers.

    LayerSkip, https://arxiv.org/abs/2404.16710, whose keys and values of the first layers are the
    draft's and the model's as they are here; unlike there, the model computes its first layers for
    the proposed tokens again. Greedy.
    """

    def __init__(self, model: Any, layers: int, step: Step, state: CarriedState) -> None:
        """`step` computes logits of tokens that follow those in a state.
        `state` is an empty one, for a trial.

        Raises StageError if the model's first layers cannot be run alone.
        """
        self._model, self._step, self._layers, self._probe = model, step, layers, state
        try:
            name = find_blocks(model)[0].name.rpartition(".")[0]
        except SourceError as error:
            raise _impossible(model, layers, str(error)) from error
        parent, _, self._name = name.rpartition(".")
        self._parent: nn.Module = model.get_submodule(parent)
        self._whole: nn.ModuleList = getattr(self._parent, self._name)
        self._first = nn.ModuleList(list(self._whole)[:layers])
        self._try()
        self._state: CarriedState | None = None

    def start(self, state: CarriedState) -> None:
        """Propose from now on what follows the text in a state of the model."""
        self._state = state

    def propose(self, known: Tensor, count: int) -> Tensor:
        """int64 [batch, known] -> int64 [batch, count].
        The cache holds all known tokens but the last, before and after.
        """
        assert self._state is not None
        step, found = known[:, -1:], []
        for _ in range(count):
            with self._shortened():
                logits = self._step(step, self._state, last=True)
            step = logits[:, -1:].argmax(-1)
            found.append(step)
        for layer in self._state.layers[: self._layers]:
            layer.crop(-count)  # type: ignore[attr-defined]
        return torch.cat(found, dim=1)

    def read_bytes(self, batch: int, context: int) -> int:
        with self._shortened():
            return weight_bytes(self._model, batch) + cache_bytes(self._probe.held, batch, context)

    @contextmanager
    def _shortened(self) -> Iterator[None]:
        """Leave the last layers out within the block."""
        setattr(self._parent, self._name, self._first)
        try:
            yield
        finally:
            setattr(self._parent, self._name, self._whole)

    def _try(self) -> None:
        """Run one token; raises StageError if another number of layers than asked for keeps it."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self._model.device)
        try:
            with self._shortened():
                self._step(token, self._probe, last=True)
        except OptkitError:
            raise
        except (RuntimeError, IndexError, KeyError, AttributeError, TypeError, ValueError) as error:
            raise _impossible(
                self._model, self._layers, f"Without the others: {type(error).__name__}: {error}"
            ) from error
        kept = [index for index, layer in enumerate(self._probe.layers) if layer.get_seq_length()]
        if kept != list(range(self._layers)):
            raise _impossible(self._model, self._layers, f"Its cache then holds keys and values of {len(kept)} layers")


def _impossible(model: Any, layers: int, why: str) -> StageError:
    return StageError(
        f"the first {layers} layers of {type(model).__name__} cannot be run alone",
        where="speculative",
        why=why,
        remedy="Take a draft model, or prompt_lookup",
    )
