"""The weights of a model by what a token does with them, in bytes and in elements.
The headers of its files are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from optkit.errors import SourceError
from optkit.model.fewer_experts import CHOSEN, COUNTS
from optkit.model.linear_layers import EXPERTS
from optkit.model.packed_names import CODED, CODES, FOUR_BIT_STATE, by_module
from optkit.model.routers import routers_of
from optkit.model.schemes import PLAIN, Scheme, scheme_of_layers
from optkit.model.shape import ModelShape, TensorInfo, place_in_list
from optkit.model.text_config import text_config

Role: TypeAlias = Literal["blocks", "experts", "plain", "head", "rows"]
HEADS = frozenset({"lm_head", "embed_out", "output"})
"""Last names of the modules that make logits."""
TABLES = ("embed", "wte", "wpe")
"""Parts of last names of modules of which a token reads one row."""
POSITIONS = ("position", "wpe")
"""Parts of last names of tables of positions."""


@dataclass(frozen=True)
class Weights:
    """One module's tensors."""

    role: Role
    """`blocks` and `experts`: matrices that quantizers take. `plain`: what they leave (routers,
    norms, projections outside the blocks). `head`: lm_head, or the embedding if that is lm_head
    too. `rows`: tables of which a token reads one row."""
    elements: int
    """Weights of its matrices; a token costs two operations for each."""
    others: int
    """Numbers beside them: biases, norms."""
    size_bytes: int
    """All of its tensors as they lie on disk, scales and zero points included."""
    arithmetic: Literal["int8", "fp8"] | None = None
    """What its products are computed in, if the inputs are rounded too; None: in the model's
    dtype.
    """
    length: int = 1
    """Rows of a table."""
    quantized: bool = False


def weights_of(shape: ModelShape) -> list[Weights]:
    """Return what a text token needs, module by module.

    Raises SourceError if packed weights lie in a layout that is not known here.
    """
    text = {
        name: info
        for name, info in shape.tensors.items()
        if shape.block(name) or (place_in_list(name) is None and not shape.in_tower(name))
    }
    modules = by_module(text)
    scheme_of, routers = _schemes(shape), routers_of(shape)
    found = {name: _weights(name, leaves, shape, scheme_of, name in routers) for name, leaves in modules.items()}
    if not any(each.role == "head" for each in found.values()):
        _tie_(found, shape)
    return list(found.values())


def expert_counts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return a layer's experts, and to how many a token is sent; (0, 0) for a dense model."""
    numbers = [(key, value) for key, value in text_config(config).items() if isinstance(value, int) and value]
    count = next((value for key, value in numbers if COUNTS.fullmatch(key)), 0)
    chosen = next((value for key, value in numbers if CHOSEN.fullmatch(key) or key == "top_k"), 0)
    return (count, chosen) if count and chosen else (0, 0)


def _schemes(shape: ModelShape) -> Any:
    """Return layer -> scheme; of methods that are not known here the words of config.json alone."""
    words = shape.config.get("quantization_config") or {}
    try:
        return scheme_of_layers(words)
    except ValueError:
        return lambda _name, _in_block: (PLAIN[0], PLAIN[1], words)


def _weights(name: str, leaves: Mapping[str, TensorInfo], shape: ModelShape, scheme_of: Any, routes: bool) -> Weights:
    in_block = shape.block(f"{name}.weight") is not None
    size = sum(info.size_bytes for info in leaves.values())
    last = name.rpartition(".")[2]
    coded = any(leaf in CODED or leaf.startswith(FOUR_BIT_STATE) for leaf in leaves)
    scheme: Scheme = scheme_of(name, in_block) if coded else PLAIN
    elements = sum(_elements(name, leaf, info, leaves, scheme[2]) for leaf, info in leaves.items())
    others = sum(info.elements for leaf, info in leaves.items() if leaf == "bias" or leaf.endswith("_bias"))
    if not elements:
        return Weights("plain", 0, sum(info.elements for info in leaves.values()), size)
    if in_block:
        role: Role = "plain" if routes else "experts" if EXPERTS in f".{name}." else "blocks"
    elif last in HEADS:
        role = "head"
    else:
        role = "rows" if any(word in last for word in TABLES) else "plain"
    length = leaves["weight"].shape[0] if role == "rows" and "weight" in leaves else 1
    return Weights(role, elements, others, size, _arithmetic(scheme[2]), length, coded)


def _elements(
    name: str, leaf: str, info: TensorInfo, leaves: Mapping[str, TensorInfo], words: Mapping[str, Any]
) -> int:
    """Return the matrix weights that a tensor stands for; 0 for biases, norms, scales and zeros."""
    if leaf in CODES:
        return info.elements * 2 if info.dtype == "U8" else info.elements * 32 // _bits(name, words)
    if leaf == "weight":
        if info.dtype == "U8" and any(each.startswith(FOUR_BIT_STATE) for each in leaves):
            return info.elements * 2
        return info.elements if len(info.shape) == 2 else 0
    # experts in one tensor: [experts, ..., ...], or MXFP4 blocks [..., groups, 16]
    if len(info.shape) >= 3 and EXPERTS in f".{name}.":
        if leaf.endswith("_blocks"):
            return info.elements * 2
        return 0 if leaf.endswith(("_scales", "_bias")) else info.elements
    return 0


def _bits(name: str, words: Mapping[str, Any]) -> int:
    found = words.get("weights", words).get("num_bits" if "weights" in words else "bits", words.get("w_bit"))
    if not found:
        raise SourceError(
            "its packed weights cannot be counted",
            where=name,
            why="The quantization_config does not say in how many bits they are, in the words of "
            "compressed-tensors, gptq or awq",
            remedy="Name the model that it was made from",
        )
    return int(found)


def _arithmetic(words: Mapping[str, Any]) -> Literal["int8", "fp8"] | None:
    if words.get("quant_method") == "fp8":  # FineGrainedFP8, as DeepSeek publishes it: inputs are rounded in groups
        return "fp8"
    if words.get("load_in_8bit"):
        return "int8"
    inputs = words.get("input_activations")
    if not inputs or inputs.get("num_bits") != 8:
        return None
    return "fp8" if inputs.get("type") == "float" else "int8"


def _tie_(found: dict[str, Weights], shape: ModelShape) -> None:
    """Let the embedding of the vocabulary be lm_head too."""
    text = text_config(shape.config)
    least = int(text.get("vocab_size") or 1)
    tables = {
        name: each
        for name, each in found.items()
        if each.role == "rows"
        and each.length >= least
        and not any(word in name.rpartition(".")[2] for word in POSITIONS)
    }
    if not tables:
        raise SourceError(
            "there is no lm_head and no embedding that could be one",
            where=str(shape.config.get("model_type") or "model"),
            why=f"Looked for {', '.join(sorted(HEADS))} and for tables of as many rows as vocab_size says",
        )
    name = max(tables, key=lambda each: tables[each].elements)
    kept = tables[name]
    found[name] = Weights("head", kept.elements, kept.others, kept.size_bytes, None, 1, kept.quantized)
