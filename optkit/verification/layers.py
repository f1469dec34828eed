"""The linear layers of a checkpoint against config.json.
Packed ones are packed, plain ones plain, and nothing is missing or left over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from optkit.model.checkpoint import Checkpoint
from optkit.model.expected_tensors import FLOATS, LayerTensors, Leaf
from optkit.model.kv_scales import KEYS, VALUES, attention_layers
from optkit.model.linear_layers import layers_of
from optkit.model.schemes import PLAIN, scheme_of_layers
from optkit.model.shape import TensorInfo

OUTSIDE = ("lm_head",)
"""Linear layers outside the decoder blocks."""
PACKED_LEAF = re.compile(
    r"(?P<layer>.+?)\.(?P<leaf>weight_(?:packed|shape|scale|zero_point|g_idx|global_scale|format)"
    r"|(?:input|output)_(?:scale|zero_point|global_scale)|qweight|qzeros|scales|g_idx|SCB|weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+))"
)
"""The names that only packed layers have."""


def linear_layers(checkpoint: Checkpoint) -> dict[str, dict[str, TensorInfo]]:
    """Return layer -> leaf -> tensor, for the decoder blocks' linear layers and lm_head."""
    found: dict[str, dict[str, TensorInfo]] = {name: {} for name in layers_of(checkpoint.shape)}
    found |= {name: {} for name in OUTSIDE if f"{name}.weight" in checkpoint.tensors}
    for name, info in checkpoint.tensors.items():
        if match := PACKED_LEAF.fullmatch(name):
            found.setdefault(match["layer"], {})[match["leaf"]] = info
    for name, leaves in found.items():
        plain = {leaf: checkpoint.tensors.get(f"{name}.{leaf}") for leaf in ("weight", "bias")}
        leaves |= {leaf: info for leaf, info in plain.items() if info}
    return found


def problems_of_layers(checkpoint: Checkpoint) -> list[str]:
    """Return a sentence per disagreement; raises ValueError for a format of unknown layout."""
    scheme_of = scheme_of_layers(checkpoint.quantization)
    problems: list[str] = []
    packed = 0
    for name, leaves in linear_layers(checkpoint).items():
        label, layout, words = scheme_of(name, checkpoint.shape.block(f"{name}.weight") is not None)
        packed += layout is not PLAIN[1]
        try:
            expected = layout(words, LayerTensors(leaves, partial(_read_leaf, checkpoint, name)))
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            said = f"config.json has no {error}" if isinstance(error, KeyError) else str(error)
            problems.append(f"{name} cannot be {label}: {said}")
            continue
        problems += [f"{name}: {problem}" for problem in _compare(leaves, expected, label)]
    scales_of_cache = (checkpoint.quantization or {}).get("kv_cache_scheme")
    if checkpoint.quantization and not packed and not scales_of_cache:
        problems.append("config.json has a quantization_config, and no layer is packed")
    return problems + _problems_of_cache(checkpoint, scales_of_cache)


def _problems_of_cache(checkpoint: Checkpoint, scheme: Mapping[str, Any] | None) -> list[str]:
    """A `kv_cache_scheme` has one scale for the keys and one for the values of each attention.
    Without it there are none.
    """
    found = [name for name in checkpoint.tensors if name.endswith((f".{KEYS}", f".{VALUES}"))]
    if not scheme:
        return [f"there is {name}, and config.json has no kv_cache_scheme" for name in found]
    wanted = [f"{attention}.{leaf}" for attention in attention_layers(checkpoint.shape) for leaf in (KEYS, VALUES)]
    if not found and scheme.get("dynamic"):
        return []
    absent = [name for name in wanted if name not in checkpoint.tensors]
    seen = {name: checkpoint.tensors[name] for name in found}
    wrong = [name for name, info in seen.items() if info.elements != 1 or info.dtype not in FLOATS]
    return [
        *(f"config.json has a kv_cache_scheme, and there is no {name}" for name in absent),
        *(f"{name} is no single number" for name in wrong),
    ]


def _read_leaf(checkpoint: Checkpoint, layer: str, leaf: str) -> bytes:
    return checkpoint.read_bytes(f"{layer}.{leaf}")


def _compare(leaves: Mapping[str, TensorInfo], expected: Mapping[str, Leaf], label: str) -> Iterator[str]:
    left_over = sorted(set(leaves) - set(expected) - {"bias"})
    missing = sorted(leaf for leaf, wanted in expected.items() if wanted.required and leaf not in leaves)
    if missing:
        yield f"config.json says {label}, and there is no {', '.join(missing)}"
    if left_over:
        yield f"config.json says {label}, which has no {', '.join(left_over)}"
    for leaf, wanted in expected.items():
        found = leaves.get(leaf)
        if found is None:
            continue
        if found.dtype not in wanted.dtypes:
            yield f"config.json says {label}, and {leaf} is {found.dtype}, not {' or '.join(wanted.dtypes)}"
        if wanted.shapes and found.shape not in wanted.shapes:
            shapes = " or ".join(str(list(shape)) for shape in wanted.shapes)
            yield f"config.json says {label} with {leaf} {shapes}, and it is {list(found.shape)}"
