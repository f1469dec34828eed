"""How transformers splits a model's matrices over devices: its plan for an architecture, and which
dimension of a tensor each device has a share of. No torch is needed.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

from optkit.model.config_defaults import TIED, assigned, config_class, tied_by_default
from optkit.model.conversions import rewritten_into
from optkit.model.linear_layers import EXPERTS
from optkit.model.shape import ModelShape, without_indices
from optkit.model.task import is_multi_modal
from optkit.model.text_config import text_config, text_type

PLAN = "base_model_tp_plan"
BY_OUTPUTS, BY_INPUTS = 0, 1
"""Dimensions of a weight [out, in] along which it is split."""
STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce"}
"""What a plan says of matrices if it splits whole heads and columns."""


@cache
def stored_plan(model_type: str) -> Mapping[str, str] | None:
    """Return transformers' plan for a model type, read without importing it.
    Empty if it has none, None if nobody can tell.
    """
    found = config_class(model_type)
    plan = assigned(found).get(PLAN) if found else None
    if plan is not None:
        with suppress(ValueError):  # a plan that code puts together
            return dict(ast.literal_eval(plan) or {})
        return None
    inherits = found and [base.id for base in found.bases if isinstance(base, ast.Name)] != ["PreTrainedConfig"]
    return None if found is None or inherits else {}


def plan_of(shape: ModelShape) -> Mapping[str, str] | None:
    """Return the plan of a model with lm_head, which the class of the model adds.
    A tied embedding is split like it; it is whole beside packed weights. Empty if there is none,
    None if nobody can tell.
    """
    plan = stored_plan(text_type(shape.config))
    tied = shape.config.get("tie_word_embeddings") or not any(name.endswith("lm_head.weight") for name in shape.tensors)
    ends = {"lm_head": "colwise"} | ({"embed_tokens": "colwise"} if tied else {})
    return {**plan, **({} if tied and shape.config.get("quantization_config") else ends)} if plan else plan


def splits_half_a_tie(shape: ModelShape) -> bool:
    """Say whether the plan splits an embedding, and not the output layer that is the same matrix.
    So it is if the language model's own config ties both, and a class with towers has the output layer.
    """
    text = text_config(shape.config)
    ties = text.get(TIED, tied_by_default(str(text.get("model_type", ""))))
    return is_multi_modal(shape.config) and bool(ties) and not any("lm_head." in name for name in shape.tensors)


def splits_joined(shape: ModelShape) -> str:
    """Return a tensor that the plan splits and transformers joins with others, or cuts up, while it loads it.
    It would join the shares. So it is too if nobody can tell the plan. Empty if there is none.
    """
    plan = plan_of(shape)
    for tensor, target in rewritten_into(shape.config, shape.tensors):
        end = target.removesuffix(".weight").lstrip("^\\.")
        end = end if "." in end else f"{tensor.removesuffix('.weight').split('.')[-2]}.{end}"
        if shape.block(tensor) and (plan is None or any(key.endswith(end) for key in plan)):
            return tensor
    return ""


def splits_stack(shape: ModelShape) -> str:
    """Return a stack of matrices that the plan splits as if it were one; empty if there is none.
    Those of experts are known.
    """
    plan = plan_of(shape) or {}
    stacks = (name for name, info in shape.tensors.items() if len(info.shape) == 3 and EXPERTS not in name)
    return next((name for name in stacks if style_of(f"{name}.weight", plan) in STYLES), "")


def splits_unsummed(shape: ModelShape) -> bool:
    """Say whether the plan splits the matrices of joined experts, and nothing adds up what the shares give."""
    plan = plan_of(shape) or {}
    return any(EXPERTS in key and key.rpartition(".")[0] not in plan for key in plan)


def splits_packed(shape: ModelShape) -> bool:
    """Say whether the packed weights of a model can be split.
    That is compressed-tensors, without scales of a KV cache, by whole heads and columns.
    """
    quantization, plan = shape.config.get("quantization_config") or {}, plan_of(shape) or {}
    ours = quantization.get("quant_method") == "compressed-tensors" and not quantization.get("kv_cache_scheme")
    return ours and bool(plan) and set(plan.values()) <= STYLES


def style_of(name: str, plan: Mapping[str, str]) -> str | None:
    """Return how a tensor of the checkpoint is split.
    Experts lie there one by one and are joined by transformers.
    """
    module = without_indices(name).rpartition(".")[0]
    found = next((style for key, style in plan.items() if module.endswith(key)), None)
    if found is None and ".experts.*" in module:
        return next((style for key, style in plan.items() if key.endswith("experts")), None)
    return found


def split_dimension_of(name: str, plan: Mapping[str, str]) -> int | None:
    """Return BY_OUTPUTS or BY_INPUTS for a tensor or module of which each device has a share, else None."""
    style = style_of(name, plan) or ""
    return BY_OUTPUTS if style.startswith("colwise") else BY_INPUTS if style.startswith("rowwise") else None
