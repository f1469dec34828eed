"""How sparse each layer becomes if they are not all alike.
The outliers of its block decide (OWL), or what its zeros change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from optkit.algorithms.allocation import choose
from optkit.algorithms.few_tokens import FEW_TOKENS
from optkit.algorithms.pruning import InputSquares, kept, wanda_scores
from optkit.algorithms.sensitivity import Seen, divergences, judged_apart, share_left
from optkit.algorithms.sparsegpt import curvature, sparsegpt
from optkit.common.out_of_resources import out_of_memory
from optkit.model.checkpoint import Checkpoint
from optkit.model.linear_layers import Layer
from optkit.model.prompts import Prompts
from optkit.model.skeleton import Skeleton
from optkit.model.skeleton_layers import float_weight
from optkit.model.together import ALONE, Together
from optkit.stage import Context
from optkit.stages.pruning.blocks import LESS_MEMORY, block_input_squares
from optkit.stages.pruning.fitting import LEVELS
from optkit.stages.sensitivity.measure import finite, layer_gradients

Method = Literal["magnitude", "wanda", "sparsegpt"]


def outlier_shares(
    source: Path,
    layers: Mapping[str, Layer],
    tokens: Tensor | Prompts,
    threshold: float,
    batch_size: int,
    context: Context,
    together: Together = ALONE,
) -> dict[str, float]:
    """Return layer -> the share of outliers among the weights of its block, of the unpruned model.
    After OWL, arXiv:2310.05175, section 3.1.

    An outlier: |weight| x input norm more than `threshold` times the mean over the block. tokens:
    int64 [sequences, sequence_length], or prompts with images.
    """
    skeleton = Skeleton(Checkpoint(source), trust_remote_code=context.trust_remote_code)
    shares: dict[str, float] = {}
    with context.progress.task("outliers", len(skeleton.blocks), "blocks") as task:
        with out_of_memory("in front of the first block", context.device, LESS_MEMORY):
            inputs = skeleton.capture_inputs(tokens, context.device, batch_size, together)
        for index, block in enumerate(skeleton.blocks):
            with skeleton.loaded(block, context.device, LESS_MEMORY):
                modules = {name: module for name, module in skeleton.linears(block).items() if name in layers}
                squares = block_input_squares(skeleton, index, inputs, modules)
                scores = [wanda_scores(float_weight(modules[name]), each.norms()) for name, each in squares.items()]
                shares |= dict.fromkeys(modules, outlier_share(scores, threshold))
                if index + 1 < len(skeleton.blocks):
                    skeleton.advance_(index, inputs)
            task.advance(note=block.name)
    return shares


def outlier_share(scores: Sequence[Tensor], threshold: float) -> float:
    """Return the share of scores above `threshold` times the mean of all of them."""
    weights = sum(each.numel() for each in scores)
    if not weights:
        return 0.0
    limit = threshold * sum(float(each.sum(dtype=torch.float64)) for each in scores) / weights
    return sum(int((each > limit).sum()) for each in scores) / weights


def by_outliers(
    shares: Mapping[str, float], layers: Mapping[str, Layer], sparsity: float, spread: float
) -> dict[str, float]:
    """Return layer -> its share of zeros, `sparsity` on average over the weights.
    It is less if outliers are many.

    The paper maps the shares to an interval of 2 x spread and then moves it to the average; here
    the layer farthest from the average is `spread` away, so that none is farther.
    """
    sizes = {name: layer.outputs * layer.inputs for name, layer in layers.items()}
    mean = sum(shares[name] * size for name, size in sizes.items()) / sum(sizes.values())
    farthest = max(abs(shares[name] - mean) for name in sizes)
    return {name: sparsity + (spread * (mean - shares[name]) / farthest if farthest else 0.0) for name in sizes}


def by_sensitivity(
    source: Path,
    layers: Mapping[str, Layer],
    tokens: Tensor | Prompts,
    sparsity: float,
    spread: float,
    method: Method,
    context: Context,
) -> dict[str, float]:
    """Return layer -> its share of zeros, as many zeros in all as asked for.
    The sum of predicted divergences is the least.

    tokens: int64 [sequences, sequence_length], or prompts with images. Experts that no token
    reaches get `sparsity`. Raises what `layer_gradients` raises.
    """
    skeleton = Skeleton(Checkpoint(source), dtype=torch.float32, trust_remote_code=context.trust_remote_code)
    levels = [sparsity + spread * (2 * step / (LEVELS - 1) - 1) for step in range(LEVELS)]
    found = layer_gradients(skeleton, tokens, layers, context.device, context.progress, context.seed)
    costs = {name: _divergences(name, weight, seen, levels, method) for name, weight, seen in found}
    items = [
        (layer.outputs * layer.inputs, costs.get(name) or [0.0], levels if costs.get(name) else [sparsity])
        for name, layer in layers.items()
    ]
    stay = [[round((1 - level) * size) for level in offered] for size, _, offered in items]
    budget = sum(round((1 - sparsity) * size) for size, _, _ in items)
    picked = choose([nats for _, nats, _ in items], stay, budget)
    return {name: offered[index] for name, (_, _, offered), index in zip(layers, items, picked, strict=True)}


def _divergences(
    name: str, weight: Tensor, seen: Sequence[Seen], levels: Sequence[float], method: Method
) -> list[float]:
    """Return the predicted divergence of a layer with each share of zeros.
    In nats, summed over all tokens.
    """
    if not seen:
        return []
    squares = InputSquares(weight.shape[1], weight.device)
    for each in seen:
        squares.add(each.inputs)
    by_output = method != "magnitude"
    scores = wanda_scores(weight, squares.norms()) if by_output else weight.abs()
    changes = [-weight.masked_fill(kept(scores, level, None, by_output), 0) for level in levels]
    left = (
        _left_by_updates(weight, seen, levels[len(levels) // 2], changes[len(levels) // 2])
        if method == "sparsegpt"
        else 1.0
    )
    nats = [left * each for each in divergences(seen, changes).tolist()]
    return finite(nats, f"prune: {name}", "Take other text, or set allocation: uniform")


def _left_by_updates(weight: Tensor, seen: Sequence[Seen], sparsity: float, plain: Tensor) -> float:
    """Return what SparseGPT leaves of the divergence that a change by Wanda causes.
    It is measured on other sequences than SparseGPT saw.
    """
    hessian, unseen = judged_apart(seen, weight)
    if not unseen or hessian.tokens < FEW_TOKENS:
        return 1.0
    solved = sparsegpt(weight, curvature(hessian.matrix()), sparsity) - weight
    return share_left(unseen, plain, solved)
