"""Copy what is on a GPU to main memory while the GPU computes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from optkit.model.reading_ahead import AHEAD_BYTES

if TYPE_CHECKING:
    from torch import Tensor


def own_copy(tensor: Tensor) -> Tensor:
    """Return a tensor in main memory, contiguous and alone in its storage."""
    tensor = tensor.detach().to("cpu").contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def own_copies(tensors: Mapping[str, Tensor], reading: AbstractContextManager[Any]) -> dict[str, Tensor]:
    """Return such copies of tensors, read within a context."""
    with reading:
        return {name: own_copy(tensor) for name, tensor in tensors.items()}


def beside_computing(there: Tensor | None) -> AbstractContextManager[Any]:
    """Return a context that reads from a GPU what is there now, while it computes on."""
    if there is None or not there.is_cuda:
        return nullcontext()
    import torch

    stream = torch.cuda.Stream(there.device)
    stream.wait_stream(torch.cuda.current_stream(there.device))
    return torch.cuda.stream(stream)


def on_gpu(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return one of the tensors that is on a GPU, if any is."""
    return next((tensor for tensor in tensors if tensor.is_cuda), None)


def in_main_memory(made: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield named tensors, in order; those on a GPU are copied by a thread while more are made."""
    waiting = deque[tuple[str, int, "Future[Tensor]"]]()
    with ThreadPoolExecutor(1, "copies") as thread:
        for name, tensor in made:
            waiting.append((name, tensor.nbytes, thread.submit(_copied, tensor, beside_computing(tensor))))
            late = tensor.is_cuda
            del tensor
            while waiting and (not late or sum(size for _, size, _ in waiting) > AHEAD_BYTES):
                name, _, copy = waiting.popleft()
                yield name, copy.result()
        yield from ((name, copy.result()) for name, _, copy in waiting)


def _copied(tensor: Tensor, reading: AbstractContextManager[Any]) -> Tensor:
    with reading:
        return own_copy(tensor)
