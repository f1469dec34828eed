"""What stands behind the decoder blocks: from the last hidden states to the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from optkit.model.blocks import Block, Call, OtherFormError, run_with_blocks


class _ReachedError(Exception):
    """Raised by the output layer to end the run: nothing behind it is needed."""


def logits_behind(model: PreTrainedModel, blocks: Sequence[Block], hidden: Tensor) -> Tensor:
    """Return the logits, float [batch, positions, vocabulary], of what leaves the last block.

    Everything outside the blocks is on the device of `hidden`; gradients flow if torch records
    them. The blocks are not run, so any positions of a sequence can be given alone. Raises
    SourceError if the model does not hand its last block's output to its head.
    """
    return _behind(model, blocks, hidden, lambda tokens: model(input_ids=tokens, use_cache=False).logits)


def logits_of_tokens(model: PreTrainedModel, blocks: Sequence[Block], hidden: Tensor) -> Tensor:
    """Return the logits, float [tokens, vocabulary], of the states of any tokens, float [tokens, hidden].

    As `logits_behind`. Each token is a sequence of its own: a model with a table of positions has
    fewer of them than a batch has tokens.
    """
    return logits_behind(model, blocks, hidden[:, None])[:, 0]


def given_to_head(model: PreTrainedModel, blocks: Sequence[Block], hidden: Tensor) -> Tensor:
    """Return what the output layer is given, float [batch, positions, hidden]; it is not run.

    Everything else outside the blocks is on the device of `hidden`. Raises SourceError if the
    model does not hand its last block's output to its head.
    """
    given: list[Tensor] = []

    def catch(_module: Any, arguments: tuple[Any, ...]) -> None:
        given.append(arguments[0])
        raise _ReachedError

    def run(tokens: Tensor) -> Tensor:
        with suppress(_ReachedError), torch.no_grad():
            model(input_ids=tokens, use_cache=False)
        return given[-1]

    with model.get_output_embeddings().register_forward_pre_hook(catch):
        return _behind(model, blocks, hidden, run)


def _behind(model: PreTrainedModel, blocks: Sequence[Block], hidden: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what `run` gives if the last block returns `hidden`, and the others what they get."""
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)

    def hand_on(index: int, given: Tensor, _call: Call) -> Tensor:
        return hidden if index == len(blocks) - 1 else given

    def found() -> Tensor:
        made = run(tokens)
        if made.shape[:2] != tokens.shape:
            raise OtherFormError(f"{list(made.shape)} came out of hidden states {list(hidden.shape)}")
        return made

    return run_with_blocks(model, blocks, hand_on, found, "what stands behind its blocks cannot be run alone")
