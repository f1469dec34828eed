"""What the graph takes of an opened model, or why it cannot: matrices and norms, and how each layer
attends, read from its modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from optkit.kernels.cuda.experts import Mixture, why_not_stacked, with_stacked_experts_
from optkit.kernels.cuda.layer_matrices import goes_through_gelu, matrix_of, stack_, why_not_matrix
from optkit.kernels.cuda.matrix import CODE_BASES, Matrix, can_stack
from optkit.kernels.cuda.schedule import ROWS

HEAD_STEP, LARGEST_HEAD = 16, 256
"""Channels of a head that the attention kernel knows: multiples of the one up to the other."""
MOST_GROUPED = 16
"""Queries that share a head of keys."""
MOST_CHANNELS = 2048
"""Of those queries together: their sums lie in the shared memory of a block."""
ROPES = {"default", "linear", "llama3", "yarn", "proportional"}
"""Rotary embeddings that do not change with the length of the text."""
ROPE_PARAMETERS = {
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"),
    *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "truncate",
}
IN_ATTENTION = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"}
NORMS = {*("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")}
IN_MLP = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"}


@dataclass(frozen=True)
class GatedMlp:
    """`down(activation(gate) * up)`."""

    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True)
class Layer:
    """What a step takes of a block. Norms are those before and behind attention and MLP."""

    qkv: Matrix
    output: Matrix
    mlp: GatedMlp | Mixture | nn.Module
    """The model's own module where it is no gated MLP, e.g. experts."""
    input_norm: Tensor | None
    attended_norm: Tensor | None
    mlp_norm: Tensor | None
    fed_norm: Tensor | None
    query_norm: Tensor | None
    """[channels of a head], or [channels of all heads]."""
    key_norm: Tensor | None
    window: int
    """Keys that are attended to, 0 for all."""
    cap: float
    """Where scores end, 0 if they do not."""
    sinks: Tensor | None

    def not_in_prompts(self, length: int) -> str:
        """Return what only steps know of how prompts of such a length attend, "" if nothing."""
        parts = {"soft caps": self.cap, "sinks": self.sinks is not None, "windows": 0 < self.window < length}
        return next((name for name, there in parts.items() if there), "")


def read_layers(model: Any) -> list[Layer]:
    """Return the layers of a model that `why_not` takes; they become views of stacked matrices."""
    kept = DynamicCache(config=model.config).layers
    windows = [int(getattr(each, "sliding_window", None) or 0) for each in kept] or [0] * len(model.model.layers)
    return [_layer(block, model, window) for block, window in zip(model.model.layers, windows, strict=True)]


def rotations(model: Any, like: Tensor, capacity: int) -> list[tuple[Tensor, Tensor]]:
    """Return the cosines and sines of each layer, float32 [capacity, rotated channels / 2]."""
    base = model.model
    positions, found = torch.arange(capacity, device=like.device)[None], {}
    kinds = list(getattr(model.config, "layer_types", None) or [None] * len(base.layers))
    typed = "layer_type" in inspect.signature(base.rotary_emb.forward).parameters
    for kind in dict.fromkeys(kinds):
        found[kind] = [
            _half(part[0].float())
            for part in base.rotary_emb(like, positions, **({"layer_type": kind} if typed else {}))
        ]
    turned = [found[kind] for kind in kinds]
    return [
        (cosines, sines) if getattr(block.self_attn, "use_rope", True) else (torch.ones_like(cosines), sines * 0)
        for block, (cosines, sines) in zip(base.layers, turned, strict=True)
    ]


def why_not(model: Any) -> str | None:
    """Return why the step of an opened model cannot be one graph, None if its modules do not say so."""
    base: Any = getattr(model, "model", None)
    for name, of in (
        ("embed_tokens", base),
        ("layers", base),
        ("norm", base),
        ("rotary_emb", base),
        ("lm_head", model),
    ):
        if not hasattr(of, name):
            return f"{type(model).__name__} has no `{name}` where Llama has one"
    if model.dtype not in CODE_BASES:
        return (
            f"its kernels compute in bfloat16 and float16, not {str(model.dtype).removeprefix('torch.')} "
            "(precision: bf16 opens it so)"
        )
    return (
        _why_not_long(model)
        or why_not_matrix(model.lm_head, "lm_head")
        or next((reason for block in base.layers if (reason := _why_not_block(block, model.config))), None)
    )


def _why_not_long(model: Any) -> str | None:
    """Return what of a model changes with the length of the text, which no short text would tell."""
    kinds, given = model.model.rotary_emb.rope_type, getattr(model.config, "rope_parameters", None) or {}
    for kind in kinds.values() if isinstance(kinds, Mapping) else [kinds]:
        if kind not in ROPES:
            return f"its rotary embeddings ({kind}) change with the length of the text"
    each = [part for part in given.values() if isinstance(part, Mapping)] or [given]
    if unknown := {name for part in each for name in part} - ROPE_PARAMETERS:
        return f"its rotary embeddings have {', '.join(sorted(unknown))}, which its kernels do not know"
    if unknown := set(getattr(model.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        return f"its layers are of {', '.join(sorted(unknown))}"
    return None


def norm_of(module: Any, like: Tensor, epsilon: float) -> Tensor | None:
    """Return what an RMS norm multiplies such inputs by, [channels]: what it makes of ones.
    None if it is none.
    """
    weight: Tensor = module(torch.ones_like(like)[None])[0].detach()
    tried = torch.linspace(-1, 2, len(like), dtype=like.dtype, device=like.device)[None]
    close = torch.allclose(module(tried).float(), F.rms_norm(tried, like.shape, weight, epsilon).float(), 2e-2, 2e-2)
    return weight.contiguous() if close else None


def _layer(block: Any, model: Any, window: int) -> Layer:
    attention, mlp, norms, epsilon = block.self_attn, mlp_of(block), _norms(block), epsilon_of(model)
    hidden = torch.empty(model.model.embed_tokens.weight.shape[1], dtype=model.dtype, device=model.device)
    found = {name: module if module is None else norm_of(module, hidden, epsilon) for name, module in norms.items()}
    query_norm, key_norm = (
        None if each is None else norm_of(each, hidden.new_empty(width_of(each, attention)), epsilon)
        for each in head_norms(attention)
    )
    gelu = is_gelu(mlp)
    return Layer(
        qkv=stack_(_parts(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj")),
        output=matrix_of(attention.o_proj),
        mlp=Mixture.of(with_stacked_experts_(mlp))
        if gelu is None
        else GatedMlp(stack_(_parts(mlp, ("gate_proj", "up_proj"), "gate_up_proj"), gelu), matrix_of(mlp.down_proj)),
        **found,
        query_norm=query_norm,
        key_norm=key_norm,
        window=window,
        cap=float(getattr(attention, "attn_logit_softcapping", None) or 0),
        sinks=getattr(attention, "sinks", None),
    )


def epsilon_of(model: Any) -> float:
    """Return what RMS norms add to the mean of squares."""
    norm = model.model.norm
    return float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 1e-6)


def kv_heads_of(config: Any) -> int:
    """Return the heads of keys and values."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _norms(block: Any) -> dict[str, Any]:
    """Return the norms of a block by their places. The one called post_attention_layernorm lies
    before the MLP, unless others do.
    """
    first, second, third, fourth = (
        getattr(block, f"{name}_layernorm", None)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
    )
    if third is None and fourth is None:
        second, third = None, second
    return {"input_norm": first, "attended_norm": second, "mlp_norm": third, "fed_norm": fourth}


def mlp_of(block: Any) -> Any:
    """Return what of a block is neither attention nor a norm; None if that is not one module."""
    others = [each for name, each in block.named_children() if name not in NORMS | {"self_attn"} and each.state_dict()]
    return others[0] if len(others) == 1 else None


def is_gelu(mlp: Any) -> bool | None:
    """Return how a gated MLP of matrices activates, True: GELU by tanh, False: SiLU; None for others."""
    names = {name for name, _ in mlp.named_children()}
    activation = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    if names - IN_MLP or activation is None or "down_proj" not in names or not names & {"gate_proj", "gate_up_proj"}:
        return None
    layers = [layer for name, layer in mlp.named_children() if name.endswith("_proj")]
    if any(why_not_matrix(layer, "") or matrix_of(layer).outputs % ROWS for layer in layers):
        return None
    if not can_stack([matrix_of(layer) for layer in _parts(mlp, ("gate_proj", "up_proj"), "gate_up_proj")]):
        return None
    return goes_through_gelu(activation)


def _why_not_block(block: Any, config: Any) -> str | None:
    attention = getattr(block, "self_attn", None)
    if attention is None or mlp_of(block) is None:
        return f"{type(block).__name__} is not attention and an MLP, with norms before and behind them"
    if reason := why_not_stacked(mlp_of(block)):
        return reason
    own = {name for name, _ in attention.named_children()} | {
        name for name, _ in attention.named_parameters(recurse=False)
    }
    if unknown := own - IN_ATTENTION - {"sinks"}:
        return f"{type(attention).__name__} has {', '.join(sorted(unknown))}, which its kernels do not know"
    if not own & {"v_proj", "qkv_proj"}:
        return f"{type(attention).__name__} has no v_proj"
    if missing := {"head_dim", "scaling", "o_proj"} - {*dir(attention)}:
        return f"{type(attention).__name__} has no {', '.join(sorted(missing))}"
    layers = _parts(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    for layer in (*layers, attention.o_proj):
        if reason := why_not_matrix(layer, "a projection of its attention"):
            return reason
    if not can_stack([matrix_of(layer) for layer in layers]):
        return "q, k and v of a block are quantized differently"
    size = int(attention.head_dim)
    if size % HEAD_STEP or size > LARGEST_HEAD:
        return f"{size} channels a head are no multiple of {HEAD_STEP} up to {LARGEST_HEAD}"
    grouped = int(config.num_attention_heads) // kv_heads_of(config)
    if grouped > MOST_GROUPED or grouped * size > MOST_CHANNELS:
        return (
            f"{grouped} queries of {size} channels share a head of keys (at most {MOST_GROUPED}, "
            f"and {MOST_CHANNELS:,} channels)"
        )
    return None


def _parts(module: Any, names: tuple[str, ...], fused: str) -> list[Any]:
    return [getattr(module, fused)] if hasattr(module, fused) else [getattr(module, name) for name in names]


def head_norms(attention: Any) -> list[Any]:
    """Return the norms of queries and keys, None for what is not there."""
    return [getattr(attention, name, None) for name in ("q_norm", "k_norm")]


def width_of(norm: nn.Module, attention: Any) -> int:
    """Return over how many channels a norm of `head_norms` goes."""
    weight = next(norm.parameters(), None)
    return int(attention.head_dim) if weight is None else weight.numel()


def _half(turns: Tensor) -> Tensor:
    """Return the angles of pairs, [positions, pairs], which most models give twice, side by side."""
    pairs = turns.shape[1] // 2
    return (turns[:, :pairs] if turns[:, :pairs].equal(turns[:, pairs:]) else turns).contiguous()
