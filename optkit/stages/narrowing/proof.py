"""Show that a smaller model, opened from its files, computes what the parts it is made of do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.head import logits_behind
from optkit.model.skeleton import Skeleton
from optkit.stage import Context
from optkit.stages.narrowing.blocks import only

TOKENS = 64
"""Tokens that run through both models."""
TOLERANCE = 1e-3
"""Largest difference of a token's vector, relative to its length, in float32. Sound surgery stays
below 1e-4.
"""
UNKNOWN = "optkit does not know how this architecture derives a block from its place or its size"


def prove(
    source: Checkpoint,
    target: Path,
    kept: Sequence[int],
    context: Context,
    masked_: Callable[[Skeleton, Checkpoint, int, int], None] | None = None,
    channels: Tensor | None = None,
    beside: Callable[[Skeleton, Skeleton, int], AbstractContextManager[None]] = lambda *_: nullcontext(),
) -> float:
    """Return the largest difference between the model in `target` and the source's kept blocks.
    It is relative to a token's vector.

    Both are run block by block in float32 on the same tokens. `masked_(skeleton, target, index,
    number)` puts what block `number` of the target is into the loaded block `index` of the source,
    in the source's shape (None: nothing was changed inside of blocks). `channels` are those of the
    hidden states that are left, int64 [hidden]. Both run block `number` inside of `beside(whole,
    smaller, number)`, the smaller one first. Raises StageError if a block computes something
    else or logits are not finite, SourceError if transformers does not open the target.
    """
    whole = Skeleton(source, torch.float32, trust_remote_code=context.trust_remote_code)
    smaller = Skeleton(Checkpoint(target), torch.float32, trust_remote_code=context.trust_remote_code)
    config = smaller.model.config.get_text_config(decoder=True)
    length = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    tokens = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(context.seed))
    expected, found = (skeleton.capture_inputs(tokens, context.device) for skeleton in (whole, smaller))
    if channels is not None:
        expected.hidden = only(expected.hidden, channels)
    difference = 0.0
    for number, index in enumerate(kept):
        whole.load_(whole.blocks[index].name, context.device)
        smaller.load_(smaller.blocks[number].name, context.device)
        if masked_:
            masked_(whole, smaller.checkpoint, index, number)
        with beside(whole, smaller, number):
            found.hidden = smaller.run_block(number, found.hidden, found.batches[0].calls[number])
            expected.hidden = whole.run_block(index, expected.hidden, expected.batches[0].calls[index])
        whole.release_(whole.blocks[index].name)
        smaller.release_(smaller.blocks[number].name)
        wanted = expected.hidden if channels is None else expected.hidden[..., channels.to(expected.hidden.device)]
        difference = max(difference, _refuse_difference(whole.blocks[index].name, wanted, found.hidden))
    _refuse_infinite(smaller, found.hidden, context.device)
    return difference


def refuse_shared(skeleton: Skeleton, removed: Sequence[int]) -> None:
    """Raise StageError for a block that shares weights with others."""
    sharing = skeleton.shared_between
    if found := [index for index in removed if skeleton.blocks[index].name in sharing]:
        free = [index for index, block in enumerate(skeleton.blocks) if block.name not in sharing]
        raise StageError(
            f"{skeleton.blocks[found[0]].name} shares weights with other blocks",
            where="prune_structured.remove_layers",
            why="What blocks share is built for as many of them as there are",
            remedy=f"Name blocks that share nothing: {', '.join(map(str, free)) or 'there are none'}",
        )


def _refuse_difference(where: str, expected: Tensor, found: Tensor) -> float:
    lengths = expected.double().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    difference = float(((found - expected).double().norm(dim=-1) / lengths).max())
    if not difference <= TOLERANCE:
        raise StageError(
            f"in the smaller model it computes something else: tokens differ by up to {difference:.2g} of their length",
            where=f"prune_structured: {where}",
            why=f"{UNKNOWN}; {TOLERANCE:g} is the limit, in float32",
            remedy="Remove other parts, or none of this architecture",
        )
    return difference


def _refuse_infinite(smaller: Skeleton, hidden: Tensor, device: str) -> None:
    smaller.load_outside_(device)
    with torch.no_grad():
        logits = logits_behind(smaller.model, smaller.blocks, hidden)
    smaller.release_outside_()
    if not bool(logits.isfinite().all()):
        raise StageError(
            "the logits of the smaller model are NaN or Inf",
            where="prune_structured",
            remedy="Remove fewer or other parts",
        )
