"""The widths of a model's parts, which axes have them, and a narrower model's config.json.

No torch is needed.

Tensors are known by their last names (`q_proj`, `c_fc`); their sizes must be those that the config
says, or the model is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeAlias

from optkit.errors import StageError
from optkit.model.attention import HEADS, KEY_HEADS, key_heads
from optkit.model.depth import hidden_size
from optkit.model.linear_layers import CONV1D_MODELS
from optkit.model.shape import PROPOSING_BLOCKS, WIDTHS, ModelShape, TensorInfo
from optkit.model.text_config import first_number, text_config, with_text_config


class Role(StrEnum):
    """What lies along an axis of a tensor, or along a part of it."""

    HIDDEN = "hidden"
    """Channels of the hidden states."""
    FFN = "ffn"
    """Channels inside of the feed-forward layers."""
    QUERY = "query"
    """Heads of the queries and of what the attention gives, each of so many channels."""
    KEY = "key"
    """Heads of the keys and of the values."""
    FIXED = "fixed"
    """Tokens, positions, the channels of one head: what no narrower model changes."""


Axis: TypeAlias = tuple[Role, ...]
"""What lies along an axis, one behind the other: queries, keys and values in one tensor."""

_TO_QUERY, _TO_KEYS, _TO_ALL = (
    ((Role.QUERY,), Role.HIDDEN),
    ((Role.KEY,), Role.HIDDEN),
    ((Role.QUERY, Role.KEY, Role.KEY), Role.HIDDEN),
)
_INTO, _INTO_BOTH, _OUT_OF = ((Role.FFN,), Role.HIDDEN), ((Role.FFN, Role.FFN), Role.HIDDEN), ((Role.HIDDEN,), Role.FFN)
_FROM_HEADS, _LOOKED_UP = ((Role.HIDDEN,), Role.QUERY), ((Role.FIXED,), Role.HIDDEN)
LINEARS: Mapping[str, tuple[Axis, Role]] = {
    "q_proj": _TO_QUERY, "k_proj": _TO_KEYS, "v_proj": _TO_KEYS, "qkv_proj": _TO_ALL, "c_attn": _TO_ALL,
    "o_proj": _FROM_HEADS, "out_proj": _FROM_HEADS, "dense": _FROM_HEADS, "attn.c_proj": _FROM_HEADS,
    "gate_proj": _INTO, "up_proj": _INTO, "fc1": _INTO, "c_fc": _INTO, "gate_up_proj": _INTO_BOTH,
    "down_proj": _OUT_OF, "fc2": _OUT_OF, "mlp.c_proj": _OUT_OF,
    "embed_tokens": _LOOKED_UP, "lm_head": _LOOKED_UP, "wte": _LOOKED_UP, "wpe": _LOOKED_UP,
    "embed_positions": _LOOKED_UP,
}  # fmt: skip
"""Linear layers and embeddings by how their names end: what their outputs and their inputs are."""
HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
TRANSPOSED = ("c_attn", "c_fc", "c_proj")
"""Layers that models of Conv1D store [in, out]."""
FFN_KEYS = ("intermediate_size", "ffn_dim", "n_inner")


@dataclass(frozen=True)
class Widths:
    """How wide a model is."""

    hidden: int
    ffn: int
    """0 if the feed-forward layers are not those of one dense layer in every block."""
    heads: int
    key_heads: int
    head_size: int

    def size(self, role: Role) -> int:
        """Return how long an axis is; raises KeyError for one that no width decides."""
        sizes = {Role.HIDDEN: self.hidden, Role.FFN: self.ffn, Role.QUERY: self.heads * self.head_size}
        return {**sizes, Role.KEY: self.key_heads * self.head_size}[role]


def widths_of(shape: ModelShape) -> Widths:
    """Return how wide a model is, as its config says and its feed-forward tensors are."""
    text = text_config(shape.config)
    hidden = hidden_size(shape.config)
    heads = first_number(text, HEADS)
    return Widths(
        hidden=hidden,
        ffn=_ffn_size(shape),
        heads=heads,
        key_heads=key_heads(text, heads),
        head_size=int(text.get("head_dim") or hidden // max(1, heads)),
    )


def _ffn_size(shape: ModelShape) -> int:
    """Return the feed-forward width of every block; 0 if blocks differ or have experts."""
    found, blocks = set(), set()
    for name, info in shape.tensors.items():
        module = name.removesuffix(".weight")
        if not shape.block(name):
            continue
        blocks.add(shape.block(name))
        if "expert" in name:
            return 0
        if module != name and _known(module) == _OUT_OF and len(info.shape) == 2:
            found.add((shape.block(name), info.shape[0 if _is_transposed(module, shape) else 1]))
    sizes = {size for _, size in found}
    return sizes.pop() if len(sizes) == 1 and len(found) == len(blocks) else 0


def axes_of(shape: ModelShape, widths: Widths) -> dict[str, tuple[Axis, ...] | None]:
    """Return what lies along the axes of each tensor.
    None for one that is not known, or is not as long as its name says.
    """
    return {name: _fitting(_axes(name, shape, widths), info, widths) for name, info in shape.tensors.items()}


def _axes(name: str, shape: ModelShape, widths: Widths) -> tuple[Axis, ...] | None:
    module, _, leaf = name.rpartition(".")
    known, info = _known(module), shape.tensors[name]
    if known and leaf == "weight" and len(info.shape) == 2:
        outputs, inputs = known
        return ((inputs,), outputs) if _is_transposed(module, shape) else (outputs, (inputs,))
    if known and leaf == "bias":
        return (known[0],)
    if len(info.shape) == 1 and _leaf(module) in HEAD_NORMS:
        return ((Role.FIXED,),) if info.shape[0] == widths.head_size else None
    is_norm = "norm" in _leaf(module) or _leaf(module).startswith("ln_")
    return ((Role.HIDDEN,),) if is_norm and len(info.shape) == 1 else None


def _fitting(axes: tuple[Axis, ...] | None, info: TensorInfo, widths: Widths) -> tuple[Axis, ...] | None:
    sizes = zip(axes or (), info.shape, strict=bool(axes))
    fits = all(Role.FIXED in axis or sum(map(widths.size, axis)) == size for axis, size in sizes)
    return axes if fits else None


def _known(module: str) -> tuple[Axis, Role] | None:
    return LINEARS.get(_leaf(module)) or LINEARS.get(".".join(module.rsplit(".", 2)[-2:]))


def _is_transposed(module: str, shape: ModelShape) -> bool:
    return _leaf(module) in TRANSPOSED and shape.config.get("model_type") in CONV1D_MODELS


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def narrower_tensors(shape: ModelShape, before: Widths, after: Widths) -> dict[str, TensorInfo]:
    """Return the tensors of a model of other widths.

    Raises StageError if a tensor beside those that change is not known, so that nobody can tell
    whether it would fit.
    """
    roles = changing(before, after)
    axes = axes_of(shape, before)
    kind = text_config(shape.config).get("model_type")
    for name, reason in _unknown(shape, axes, roles):
        raise StageError(
            f"optkit does not know how to narrow this tensor of {kind}, {list(shape.tensors[name].shape)}",
            where=f"prune_structured: {name}",
            why=reason,
            remedy="Remove decoder blocks instead: remove_layers takes every architecture",
        )
    found = {}
    for name, info in shape.tensors.items():
        known = axes[name] or ()
        touched = any(role in roles for axis in known for role in axis)
        lengths = (_length(axis, size, after) for axis, size in zip(known, info.shape, strict=True)) if touched else ()
        found[name] = replace(info, shape=tuple(lengths)) if touched else info
    return found


def _length(axis: Axis, size: int, widths: Widths) -> int:
    return size if Role.FIXED in axis else sum(widths.size(role) for role in axis)


def changing(before: Widths, after: Widths) -> frozenset[Role]:
    """Return the axes that are shorter afterwards."""
    return frozenset(role for role in Role if role is not Role.FIXED and before.size(role) != after.size(role))


def _unknown(
    shape: ModelShape, axes: Mapping[str, tuple[Axis, ...] | None], roles: frozenset[Role]
) -> Iterator[tuple[str, str]]:
    """Yield the tensors that might have to change and are not known."""
    parents = {
        _parent(name)
        for name, known in axes.items()
        if known and shape.block(name) and any(role in roles - {Role.HIDDEN} for axis in known for role in axis)
    }
    for name, known in axes.items():
        if known is None and Role.HIDDEN in roles:
            yield name, "Everything that reads or writes the hidden states would have to become narrower with them"
        elif known is None and _parent(name) in parents:
            yield name, "It stands beside the layers that become narrower"


def _parent(name: str) -> str:
    """Return the module that a tensor's module is in."""
    return name.removesuffix(".bias").removesuffix(".weight").rpartition(".")[0]


def narrower_config(config: Mapping[str, Any], before: Widths, after: Widths) -> dict[str, Any]:
    """Return config.json of a model of other widths.
    The size of a head is written out if it no longer follows.

    What RMS norms add to the mean square grows as that does if it is taken over fewer channels.
    """

    def change(text: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(text)
        if found.get(PROPOSING_BLOCKS):
            found[PROPOSING_BLOCKS] = 0
        if after.hidden != before.hidden:
            found |= {next(key for key in WIDTHS if key in text): after.hidden}
            found |= {key: text[key] * before.hidden / after.hidden for key in ("rms_norm_eps",) if key in text}
        if after.ffn != before.ffn:
            named = [key for key in FFN_KEYS if key in text]
            found |= {next((key for key in named if text[key]), [*named, "n_inner"][0]): after.ffn}
        if after.heads != before.heads:
            found |= {next(key for key in HEADS if key in text): after.heads}
        if after.key_heads != before.key_heads:
            found |= {next((key for key in KEY_HEADS if key in text), KEY_HEADS[0]): after.key_heads}
        if "head_dim" in text or after.hidden != after.heads * after.head_size:
            found |= {"head_dim": after.head_size}
        return found

    return with_text_config(config, change)
