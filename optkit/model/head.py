"""What stands behind the decoder blocks: from the last hidden states to the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from optkit.errors import SourceError
from optkit.model.blocks import Block
from optkit.model.replaced_forward import replaced_forward


class _OtherFormError(Exception):
    """The model takes the output of a block for something else than what it was given."""


class _ReachedError(Exception):
    """Raised by the output layer to end the run: nothing behind it is needed."""


def logits_behind(model: PreTrainedModel, blocks: Sequence[Block], hidden: Tensor) -> Tensor:
    """Return the logits, float [batch, positions, vocabulary], of what leaves the last block.

    Everything outside the blocks is on the device of `hidden`; gradients flow if torch records
    them. The blocks are not run, so any positions of a sequence can be given alone. Raises
    SourceError if the model does not hand its last block's output to its head.
    """
    return _behind(model, blocks, hidden, lambda tokens: model(input_ids=tokens, use_cache=False).logits)


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
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    reason = ""
    for as_tuple in (False, True):
        with _ending_with(blocks, hidden, as_tuple):
            try:
                found = run(tokens)
            except (_OtherFormError, TypeError, ValueError, IndexError, AttributeError) as error:
                reason = reason or str(error).partition("\n")[0]
                continue
        if found.shape[:2] == tokens.shape:
            return found
        reason = f"{list(found.shape)} came out of hidden states {list(hidden.shape)}"
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
            raise _OtherFormError(
                "the hidden states that enter a block are not those that the block before it returned"
            )
        passed.append(given)
        output = last if len(passed) == len(blocks) else given
        return (output,) if as_tuple else output

    with replaced_forward({block.module: hand_on for block in blocks}):
        yield
