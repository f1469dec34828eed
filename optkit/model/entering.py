"""What goes into the first block of a model, and what each block is called with.
Of an encoder-decoder the encoder's blocks come first, and what they leave goes into the decoder's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optkit.errors import StageError
from optkit.model.blocks import Batch, BlockInputs, Call, Encoded, record_calls
from optkit.model.memory import is_little_of_gpu, room_for_states, usable_gpu_bytes
from optkit.model.passage import Passage
from optkit.model.prompts import Prompts, in_batches, longest_of, placed
from optkit.model.together import Together

if TYPE_CHECKING:
    from optkit.model.skeleton import Skeleton


def entering(
    skeleton: Skeleton, prompts: Tensor | Prompts, device: str | torch.device, batch_size: int, together: Together
) -> BlockInputs:
    """Return what a share of prompts is before the first block; raises as `Skeleton.capture_inputs`."""
    prompts = together.share(prompts)
    inputs = _entered(skeleton, prompts, device, batch_size, None)
    inputs.together = together
    if len(skeleton.chains) > 1:
        inputs.following = partial(_enter_decoder_, inputs, skeleton, prompts, device)
    return inputs


@contextmanager
def _firsts(skeleton: Skeleton, chains: int, device: str | torch.device) -> Iterator[None]:
    """Have the first block of an encoder, and of its decoder, on the device for a while.
    T5's make something for all others.
    """
    with ExitStack() as stack:
        for chain in skeleton.chains[:chains] if len(skeleton.chains) > 1 else ():
            stack.enter_context(skeleton.loaded(chain[0], str(device), "Lower the calibration's sequence_length"))
        yield


def _enter_decoder_(
    inputs: BlockInputs, skeleton: Skeleton, prompts: Tensor | Prompts, device: str | torch.device
) -> None:
    behind = _entered(skeleton, prompts, device, 1, inputs)
    inputs.encoded, inputs.following = inputs.hidden, None
    inputs.hidden, inputs.batches, inputs.passage = behind.hidden, behind.batches, behind.passage


def _entered(
    skeleton: Skeleton,
    prompts: Tensor | Prompts,
    device: str | torch.device,
    batch_size: int,
    encoder: BlockInputs | None,
) -> BlockInputs:
    """Return what goes into the first list of blocks; behind an encoder's, into the second."""
    chain, hidden, passage = skeleton.chains[1 if encoder else 0], None, None
    batches: list[Batch] = []
    with skeleton.outside_but_head(device), _firsts(skeleton, 2 if encoder else 1, device):
        for number, (rows, given) in enumerate(in_batches(prompts, batch_size)):
            left = encoder.batches[number] if encoder else None
            encoded = Encoded(skeleton.chains[0], encoder.at(left)) if encoder and left else None
            entered, calls = record_calls(skeleton.model, chain, placed(given, device, skeleton.dtype), encoded)
            length = entered.shape[1]
            if hidden is None:
                longest = length if len(prompts) == 1 else max(longest_of(prompts), length)
                shape = (len(prompts), longest, *entered.shape[2:])
                if not is_little_of_gpu(math.prod(shape) * entered.itemsize, usable_gpu_bytes(entered.device)):
                    passage = Passage(entered.device)
                hidden = room_for_states(entered, shape, passage.device if passage else None)
            else:
                first = batches[0].calls[-len(calls) :]
                equal = cache(torch.equal)  # most blocks are called with the same tensors
                calls = tuple(shared_with(call, other, equal) for call, other in zip(calls, first, strict=True))
            here = rows, slice(length)
            hidden[here] = entered
            batches.append(Batch(here, (*(left.calls if left else ()), *calls)))
    if hidden is None:
        raise StageError("there are no calibration tokens", where=str(skeleton.checkpoint.directory))
    return BlockInputs(hidden, tuple(batches), passage=passage)


def shared_with(call: Call, reference: Call, equal: Callable[[Tensor, Tensor], bool]) -> Call:
    """Return the call with tensors equal to the reference's replaced by those: batches share them.
    It is the reference itself if nothing differs.
    """
    arguments = _shared(call.arguments, reference.arguments, equal)
    keywords = {name: _shared(value, reference.keywords.get(name), equal) for name, value in call.keywords.items()}
    shared = replace(call, arguments=arguments, keywords=keywords)
    return reference if _same(vars(shared), vars(reference)) else shared


def _shared(value: Any, reference: Any, equal: Callable[[Tensor, Tensor], bool]) -> Any:
    if isinstance(value, Tensor) and isinstance(reference, Tensor):
        same = value.dtype == reference.dtype and value.shape == reference.shape and equal(value, reference)
        return reference if same else value
    if type(value) is tuple and type(reference) is tuple and len(value) == len(reference):
        return tuple(_shared(item, other, equal) for item, other in zip(value, reference, strict=True))
    return value


def _same(value: Any, other: Any) -> bool:
    """Say whether values are the same, tensors and objects by identity."""
    if type(value) is not type(other):
        return False
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_same(value[name], other[name]) for name in value)
    if isinstance(value, tuple):
        return len(value) == len(other) and all(map(_same, value, other))
    return value is other or (isinstance(value, int | float | str) and value == other)
