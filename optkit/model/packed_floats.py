"""Which float weights the tensors of a packed checkpoint stand for, by names and headers. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optkit.errors import SourceError
from optkit.model.config_defaults import keys_of
from optkit.model.expected_tensors import FLOATS
from optkit.model.linear_layers import CONV1D_MODELS
from optkit.model.output_layer import HEAD
from optkit.model.packed_names import CODED, CODES, FOUR_BIT_STATE, METHODS_WITH_CODES, by_module
from optkit.model.schemes import LAYOUTS, activation_bits, scheme_of_layers
from optkit.model.shape import ModelShape, TensorInfo

BLOCKS, SCALES = "_blocks", "_scales"
"""How the names of gpt-oss's packed experts end: `experts.gate_up_proj_blocks` is `experts.gate_up_proj`."""
TILES = "_scale_inv"
"""How the name of the scales of FP8 experts in one tensor ends: `experts.gate_up_proj_scale_inv`."""
ALGORITHMS = ("FP8", "NVFP4")
"""What NVIDIA's ModelOpt may have done to weights, as it says it: one scale, or two in a row."""
METHODS = (*METHODS_WITH_CODES, "fp8", "mxfp4", "modelopt")
"""The values of `quant_method` whose weights become floats here."""
INTO_HIDDEN = ("o_proj", "out_proj", "c_proj", "down_proj", "w2", "wo", "fc2", "dense_4h_to_h", "dense", "fc_out")
"""Last names of layers that lead back into the hidden states."""


STACKED = frozenset({"gpt_oss"})
"""`model_type` of those whose class, in transformers and vLLM, reads experts in MXFP4 by these names."""
STALE = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files that say how the weights were packed."""
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""What packed weights can become, and what safetensors calls it."""
WORK_BYTES = 12
"""What unpacking a weight takes: its codes as integers, in float32, and rounded."""
READ_BYTES = 4
"""Of those, what is in main memory if a GPU unpacks it."""
SCALES_OF_CODES = ("weight_scale", "weight_scale_inv", "SCB")
CACHE_SCALES = frozenset({"k_scale", "v_scale", "q_scale", "kv_scale"})


@dataclass(frozen=True)
class PackedFloat:
    """One float weight, and the tensors that stand for it."""

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    """Also what is of no use beside floats: scales of activations."""


def packed_floats(shape: ModelShape) -> dict[str, PackedFloat]:
    """Return the float weights of a packed model by their names.

    Raises SourceError for a model that is not packed, or in a form that is not known here.
    """
    words = shape.config.get("quantization_config") or {}
    where = str(shape.config.get("model_type") or "model")
    method = words.get("quant_method")
    if method not in METHODS or (method == "modelopt" and words.get("quant_algo") not in ALGORITHMS):
        raise unreadable(words, where)
    try:
        if method in METHODS_WITH_CODES:
            scheme_of_layers(words)
        modules = by_module(shape.tensors).items()
        found = dict(each for name, leaves in modules for each in _floats(name, leaves, shape))
    except (ValueError, LookupError) as error:  # scales without codes, or a format that nobody knows
        raise unreadable(words, where) from error
    if not found:
        raise unreadable(words, where)
    return found


def refuse_unsaid_codes(shape: ModelShape, where: str, cast: bool = False) -> None:
    """Raise SourceError for codes of which config.json says nothing, and for weights of a dtype that stages do
    not read. `cast`: the first stage makes others of floats.
    """
    if shape.config.get("quantization_config"):
        return
    beside = next((name for name in shape.tensors if name.rpartition(".")[2] in (*CODES, *SCALES_OF_CODES)), "")
    if beside and not cast:
        raise SourceError(
            f"{beside} belongs to packed weights, and config.json has no quantization_config",
            where=where,
            why="What the codes stand for is not known without it",
            remedy="Take config.json from the model's source again",
        )
    for name, info in shape.tensors.items():
        is_float, is_code = info.dtype.startswith("F"), info.dtype.startswith(("F8", "F4"))
        if info.dtype in FLOATS or (cast and is_float) or not (is_code or name.endswith(".weight")):
            continue
        without = " without scales, and config.json has no quantization_config" if is_code else ""
        fitting = (
            f"If the weights are meant as they are, put `- {'bf16' if is_code else 'cast: float32'}` before the other"
        )
        raise SourceError(
            f"{name} is in {info.dtype}{without}",
            where=where,
            why="Stages read float weights of 16 or 32 bits",
            remedy=f"{fitting} stages" if is_float else "Take the checkpoint from its source again",
        )


def stacked_experts(shape: ModelShape) -> dict[str, TensorInfo]:
    """Return the float tensors, [experts, in, out], that may lie in MXFP4 as gpt-oss' do."""
    if shape.config.get("model_type") not in STACKED:
        return {}
    return {name: info for name, info in shape.tensors.items() if len(info.shape) == 3 and info.dtype in FLOATS}


def refuse_unopened(shape: ModelShape, where: str) -> None:
    """Raise SourceError for packed weights that nothing opens as they are, so that nothing measures them."""
    method = shape.quant_method
    opened = keys_of("AUTO_QUANTIZATION_CONFIG_MAPPING", "quantizers/auto.py")
    if method and opened and not opened & {method, f"{method}_4bit"}:
        raise SourceError(
            f"transformers does not open weights packed by {method}",
            where=where,
            why="So they cannot be measured as they are",
            remedy="Run a recipe of `dequantize` alone without evals, and start from its artifact",
        )


def unreadable(words: Mapping[str, Any], where: str) -> SourceError:
    """Return what to raise for packed weights that nobody here makes floats of."""
    formats = {str(each.get("format")) for each in (words.get("config_groups") or {}).values()}
    formats |= {str(words[key]) for key in ("format", "version", "checkpoint_format", "quant_algo") if words.get(key)}
    said = ", ".join(sorted(formats - {"None"}))
    return SourceError(
        f"no float weights can be made of quant_method {words.get('quant_method')}{f' ({said})' if said else ''}",
        where=where,
        why=f"optkit reads {', '.join(METHODS)}; "
        f"of compressed-tensors {', '.join(sorted(LAYOUTS.keys() - {'dense'}))}; of modelopt {', '.join(ALGORITHMS)}",
        remedy="Start from the model's float weights",
    )


def _floats(module: str, leaves: Mapping[str, TensorInfo], shape: ModelShape) -> Iterator[tuple[str, PackedFloat]]:
    for leaf, info in leaves.items():
        name = leaf.removesuffix(BLOCKS)
        if name != leaf and name + SCALES in leaves and len(info.shape) == 4:
            experts, outputs, groups, half = info.shape
            parts = tuple(f"{module}.{name}{part}" for part in (BLOCKS, SCALES))
            yield f"{module}.{name}", PackedFloat((experts, groups * half * 2, outputs), parts)
        if info.dtype.startswith("F8") and len(info.shape) == 3 and leaf + TILES in leaves:
            yield f"{module}.{leaf}", PackedFloat(info.shape, (f"{module}.{leaf}", f"{module}.{leaf}{TILES}"))
    if not any(leaf in CODED or leaf.startswith(FOUR_BIT_STATE) for leaf in leaves):
        return
    outputs, inputs = _outputs_and_inputs(module, leaves, shape)
    transposed = shape.config.get("model_type") in CONV1D_MODELS and module != HEAD
    parts = tuple(f"{module}.{leaf}" for leaf in leaves if leaf != "bias")
    yield f"{module}.weight", PackedFloat((inputs, outputs) if transposed else (outputs, inputs), parts)


def _outputs_and_inputs(module: str, leaves: Mapping[str, TensorInfo], shape: ModelShape) -> tuple[int, int]:
    words = shape.config.get("quantization_config") or {}
    if packed := leaves.get("weight_packed"):
        bits = 4 if packed.dtype == "U8" else int(_words_of(module, shape)["weights"]["num_bits"])
        return packed.shape[0], math.prod(packed.shape[1:]) * (8 if packed.dtype == "U8" else 32) // bits
    if (packed := leaves.get("qweight")) and words.get("quant_method") == "awq":
        return packed.shape[1] * 32 // int(words.get("bits", words.get("w_bit", 4))), packed.shape[0]
    if packed:
        if order := leaves.get("g_idx"):
            return packed.shape[1], order.shape[0]
        return packed.shape[1], packed.shape[0] * 32 // int(_words_of(module, shape)["bits"])
    weight = leaves["weight"]
    if any(leaf.startswith(FOUR_BIT_STATE) for leaf in leaves):
        # how many outputs there are stands in the JSON beside it, which is no header
        wide = shape.width or 1
        other = weight.elements * 2 // wide
        return (wide, other) if module.rpartition(".")[2] in INTO_HIDDEN else (other, wide)
    outputs, inputs = weight.shape
    return outputs, 2 * inputs if "weight_scale_2" in leaves else inputs


def _words_of(module: str, shape: ModelShape) -> Mapping[str, Any]:
    """Return what config.json says of a packed layer."""
    return scheme_of_layers(shape.config["quantization_config"])(module, True)[2]


def cache_scales(shape: ModelShape) -> list[str]:
    """Return the tensors that scale a KV cache in 8 bits."""
    return [name for name in shape.tensors if name.rpartition(".")[2] in CACHE_SCALES]


def left_out(shape: ModelShape) -> dict[str, str]:
    """Return the tensors of a packed checkpoint that have no place beside floats -> the reason.
    Raises what `packed_floats` raises.
    """
    parts = [part for each in packed_floats(shape).values() for part in each.parts]
    scales = [part for part in parts if part.rpartition(".")[2].startswith(("activation", "input", "output"))]
    return {
        **dict.fromkeys(cache_scales(shape), "a scale of the KV cache, which is of floats now"),
        **dict.fromkeys(scales, "a scale of activations, which are floats now"),
    }


def float_dtype(shape: ModelShape) -> str:
    """Return the dtype that floats of packed weights have if the recipe does not say."""
    said = str(shape.config.get("dtype") or shape.config.get("torch_dtype"))
    return said if said in DTYPES else "bfloat16"


def forget_packing(directory: Path) -> None:
    """Delete the files of a model directory that say how its weights were packed."""
    for name in STALE:
        (directory / name).unlink(missing_ok=True)


def float_shape(shape: ModelShape, dtype: str | None = None) -> ModelShape:
    """Return the shape of the float model whose weights are in `dtype`, or in their `float_dtype`.
    Raises what `packed_floats` raises.
    """
    dtype = dtype or float_dtype(shape)
    floats = packed_floats(shape)
    dropped = {part for each in floats.values() for part in each.parts} | set(cache_scales(shape))
    tensors = {name: info for name, info in shape.tensors.items() if name not in dropped}
    tensors |= {name: TensorInfo(DTYPES[dtype], each.shape) for name, each in floats.items()}
    config = {key: each for key, each in shape.config.items() if key not in ("quantization_config", "torch_dtype")}
    return replace(shape, config={**config, "dtype": dtype}, tensors=tensors)


def unpacking_bytes(shape: ModelShape, device: str) -> tuple[int, int]:
    """Return what unpacking one weight takes of main memory, and of a GPU: of experts in one tensor, one."""
    sizes = [each.shape for each in packed_floats(shape).values()]
    largest = max(math.prod(size[1:] if len(size) == 3 else size) for size in sizes)
    if device.startswith("cuda"):
        return largest * READ_BYTES, largest * WORK_BYTES
    return largest * WORK_BYTES, 0


def notes_on_floats(shape: ModelShape, what: str) -> tuple[str, ...]:
    """Return the sentence that packed weights become floats; `what`: e.g. `are read as float16`."""
    words = shape.config["quantization_config"]
    said = f"the weights, packed by {words.get('quant_method')}, {what}"
    if activation_bits(words) or words.get("activation_scheme") or words.get("quant_algo"):
        said += "; the packed model rounds what goes into its layers too, the float one does not"
    return (said,)
