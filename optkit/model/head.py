"""What stands behind the decoder blocks: from the hidden states that leave the last of them to the logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from optkit.errors import SourceError
from optkit.model.blocks import Block


class _OtherFormError(Exception):
    """The model takes the output of a block for something else than what it was given."""


def logits_behind(model: PreTrainedModel, blocks: Sequence[Block], hidden: Tensor) -> Tensor:
    """Return the logits, float [batch, positions, vocabulary], of what leaves the last block, float [batch, positions, hidden].

    Everything outside the blocks is on the device of `hidden`; gradients flow where torch records them. The blocks are not run, so any
    positions of a sequence can be given alone. Raises SourceError where the model does not hand its last block's output to its head.
    """
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    reason = ""
    for as_tuple in (False, True):
        with _ending_with(blocks, hidden, as_tuple):
            try:
                logits: Tensor = model(input_ids=tokens, use_cache=False).logits
            except (_OtherFormError, TypeError, ValueError, IndexError, AttributeError) as error:
                reason = reason or str(error).partition("\n")[0]
                continue
        if logits.shape[:2] == tokens.shape:
            return logits
        reason = f"the logits are {list(logits.shape)} for hidden states {list(hidden.shape)}"
    raise SourceError(
        f"unsupported architecture {type(model).__name__}: what stands behind its blocks cannot be run alone",
        where=model.config.model_type,
        why=reason,
    )


@contextmanager
def _ending_with(blocks: Sequence[Block], last: Tensor, as_tuple: bool) -> Iterator[None]:
    """Let each block hand on what it was given, and the last one return `last`."""
    passed: list[Tensor] = []

    def hand_on(*arguments: Any, **keywords: Any) -> Any:
        given: Tensor = arguments[0] if arguments else keywords["hidden_states"]
        if passed and given is not passed[-1]:
            raise _OtherFormError("the hidden states that enter a block are not those that the block before it returned")
        passed.append(given)
        output = last if len(passed) == len(blocks) else given
        return (output,) if as_tuple else output

    try:
        for block in blocks:
            block.module.forward = hand_on
        yield
    finally:
        for block in blocks:
            block.module.__dict__.pop("forward", None)
