"""Whether the layers of a split model are shares that a decode step can add up: whole heads of
attention and whole columns of MLPs.
"""

from __future__ import annotations

from typing import Any

from optkit.kernels.cuda.step_layers import head_norms, is_gelu, mlp_of, width_of
from optkit.kernels.shares import split_dimension
from optkit.model.split_plan import BY_INPUTS, BY_OUTPUTS

SUMMED = {"o_proj", "down_proj"}
"""Whose products are sums over the GPUs of a split model."""
FUSED = {"qkv_proj", "gate_up_proj"}
"""Whose shares are no whole heads: transformers cuts through their parts."""


def why_not_split(model: Any) -> str | None:
    """Return why the step of a model that `why_not` takes cannot be computed by shares.
    None if it can, or if the model is not split.
    """
    if split_dimension(model.lm_head) is None:
        return None
    return next((reason for block in model.model.layers if (reason := _why_not_block(block))), None)


def _why_not_block(block: Any) -> str | None:
    attention, mlp = block.self_attn, mlp_of(block)
    if is_gelu(mlp) is None:
        return f"{type(mlp).__name__} is split over GPUs and is no MLP of gate, up and down"
    if any(norm is not None and width_of(norm, attention) != attention.head_dim for norm in head_norms(attention)):
        return f"{type(attention).__name__} norms all heads together, and each GPU has a share of them"
    projections = dict(attention.named_children()) | dict(mlp.named_children())
    for name, layer in projections.items():
        wanted = BY_INPUTS if name in SUMMED else BY_OUTPUTS
        if name in FUSED or (name.endswith("_proj") and split_dimension(layer) != wanted):
            return f"{name} of {type(block).__name__} is not split by whole heads or columns"
    return None
