"""What goes into the first block of a model, and what each block is called with.
Of an encoder-decoder the encoder's blocks come first, and what they leave goes into the decoder's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from optkit.errors import StageError
from optkit.model.blocks import Batch, BlockInputs, Encoded, record_calls, shared_with
from optkit.model.memory import room_for_states
from optkit.model.prompts import Prompts, in_batches, longest_of, placed
from optkit.model.together import Together

if TYPE_CHECKING:
    from optkit.model.skeleton import Skeleton


def entering(
    skeleton: Skeleton,
    prompts: Tensor | Prompts,
    device: str | torch.device,
    batch_size: int,
    together: Together,
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
    inputs.hidden, inputs.batches = behind.hidden, behind.batches


def _entered(
    skeleton: Skeleton,
    prompts: Tensor | Prompts,
    device: str | torch.device,
    batch_size: int,
    encoder: BlockInputs | None,
) -> BlockInputs:
    """Return what goes into the first list of blocks; behind an encoder's, into the second."""
    chain, hidden = skeleton.chains[1 if encoder else 0], None
    batches: list[Batch] = []
    with skeleton.outside_but_head(device), _firsts(skeleton, 2 if encoder else 1, device):
        for number, (rows, given) in enumerate(in_batches(prompts, batch_size)):
            left = encoder.batches[number] if encoder else None
            encoded = Encoded(skeleton.chains[0], encoder.hidden[left.rows]) if encoder and left else None
            entered, calls = record_calls(skeleton.model, chain, placed(given, device, skeleton.dtype), encoded)
            length = entered.shape[1]
            if hidden is None:
                longest = length if len(prompts) == 1 else max(longest_of(prompts), length)
                hidden = room_for_states(entered, (len(prompts), longest, *entered.shape[2:]))
            else:
                first = batches[0].calls[-len(calls) :]
                equal = cache(torch.equal)  # most blocks are called with the same tensors
                calls = tuple(shared_with(call, other, equal) for call, other in zip(calls, first, strict=True))
            here = rows, slice(length)
            hidden[here] = entered
            batches.append(Batch(here, (*(left.calls if left else ()), *calls)))
    if hidden is None:
        raise StageError("there are no calibration tokens", where=str(skeleton.checkpoint.directory))
    return BlockInputs(hidden, tuple(batches))
