"""What the sessions have in common whose model torch runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from optkit.common.out_of_resources import memory_errors
from optkit.model.memory import return_freed_memory
from optkit.model.mixed_dtypes import one_dtype
from optkit.session.generating import TextSession


class TorchModel(TextSession):
    """An opened model of text that torch runs. Who inherits it sets `_opened`."""

    _opened: PreTrainedModel | None

    @property
    def model(self) -> PreTrainedModel:
        """The torch model; raises OptkitError after `close`."""
        return self._in_use(self._opened)

    @property
    def dtype(self) -> str:
        """What the model computes in, e.g. `float16`."""
        return str(self.model.dtype).removeprefix("torch.")

    def close(self) -> None:
        """Give the memory back; the session cannot be used afterwards."""
        self._opened = None
        return_freed_memory(self.device)

    @contextmanager
    def _computes(self, what: str, remedy: str) -> Iterator[None]:
        where = str(self.directory)
        with memory_errors(f"{what} on {self.device}", where, remedy), one_dtype(where), torch.inference_mode():
            yield
