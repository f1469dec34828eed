"""Copy what is on a GPU to main memory while the GPU computes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from optkit.model.main_memory import own_bytes, pinned
from optkit.model.reading_ahead import AHEAD_BYTES

if TYPE_CHECKING:
    from torch import Tensor

PASSED_BYTES = 1 << 25
"""Pinned memory through which what is on a GPU comes."""


def own_copy(tensor: Tensor) -> Tensor:
    """Return a tensor in main memory, contiguous and alone in its storage."""
    tensor = tensor.detach().contiguous()
    if tensor.is_cuda:
        return by_pieces(tensor)
    tensor = tensor.to("cpu")
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def by_pieces(tensor: Tensor) -> Tensor:
    """Return a copy of a contiguous tensor that went by way of pinned memory, PASSED_BYTES at a time.
    While a GPU copies to other memory, no thread can give it work.
    """
    import torch

    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    here, passed = (
        torch.frombuffer(own_bytes(tensor.nbytes), dtype=torch.uint8),
        pinned(min(PASSED_BYTES, tensor.nbytes)),
    )
    there = tensor.flatten().view(torch.uint8)
    for part, place in zip(there.split(PASSED_BYTES), here.split(PASSED_BYTES), strict=True):
        place.copy_(passed[: len(part)].copy_(part))
    return here.view(tensor.dtype).view(tensor.shape)


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
    waiting = deque[tuple[int, "Future[dict[str, Tensor]]"]]()
    with ThreadPoolExecutor(1, "copies") as thread:
        for name, tensor in made:
            waiting.append((tensor.nbytes, thread.submit(own_copies, {name: tensor}, beside_computing(tensor))))
            late = tensor.is_cuda
            del tensor
            while waiting and (not late or sum(size for size, _ in waiting) > AHEAD_BYTES):
                yield from waiting.popleft()[1].result().items()
        for _, copies in waiting:
            yield from copies.result().items()
