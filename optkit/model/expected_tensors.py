"""How a packed linear layer lies on disk, format by format.
The words of config.json alone say which tensors it must have.

Written from the readers' side (compressed-tensors 0.19, gptqmodel 7, AutoAWQ 0.2.9, bitsandbytes
0.50) and not from the writers in `optkit.stages`, so that one checks the other. Shapes are
[outputs, inputs] of the layer's weight. A new format is a line in `schemes.py` and, if it
lies otherwise than those here, a function here.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from optkit.model.shape import TensorInfo

FLOATS = ("F32", "F16", "BF16")
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Leaf:
    """One tensor of a layer."""

    dtypes: tuple[str, ...]
    """Any of these."""
    shapes: tuple[Shape, ...]
    """Any of these."""
    required: bool = True


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of one layer as they lie in the files."""

    leaves: Mapping[str, TensorInfo]
    read: Callable[[str], bytes]
    """The bytes of a leaf."""

    def shape(self, leaf: str, dimensions: int) -> Shape:
        """Return the shape of a leaf; raises ValueError if it is missing or of other dimensions."""
        if leaf not in self.leaves:
            raise ValueError(f"there is no {leaf}")
        shape = self.leaves[leaf].shape
        if len(shape) != dimensions:
            raise ValueError(f"{leaf} is {list(shape)}, not of {dimensions} dimensions")
        return shape


Layout: TypeAlias = Callable[[Mapping[str, Any], LayerTensors], dict[str, Leaf]]
"""From the words for a layer in config.json and the layer itself to leaf -> what it must be;
ValueError if the layer does not tell.
"""


def plain(_words: Mapping[str, Any], _layer: LayerTensors) -> dict[str, Leaf]:
    """A layer that is not packed."""
    return {"weight": Leaf(FLOATS, ())}


def pack_quantized(words: Mapping[str, Any], layer: LayerTensors) -> dict[str, Leaf]:
    """compressed-tensors `pack-quantized`: codes of 2 to 8 bits in 32-bit words along the inputs."""
    weights = words["weights"]
    layer.shape("weight_shape", 1)
    outputs, inputs = struct.unpack("<2q", layer.read("weight_shape"))
    scales = _scale_shapes(weights, outputs, inputs)
    leaves = {
        "weight_packed": Leaf(("I32",), ((outputs, _words(inputs, weights["num_bits"])),)),
        "weight_shape": Leaf(("I64",), ((2,),)),
        "weight_scale": Leaf(FLOATS, scales),
        "weight_g_idx": Leaf(("I32", "I64"), ((inputs,),), required=weights.get("actorder") in ("group", True)),
    }
    if not weights.get("symmetric", True):
        leaves["weight_zero_point"] = Leaf(
            ("I32",), tuple((_words(outputs, weights["num_bits"]), shape[-1]) for shape in scales)
        )
    return leaves | _activations(words)


def naive_quantized(words: Mapping[str, Any], layer: LayerTensors) -> dict[str, Leaf]:
    """compressed-tensors `naive-quantized`: int8 or float8, as the type says."""
    return one_code_each(words, layer, "F8_E4M3" if words["weights"].get("type") == "float" else "I8")


def nvfp4(words: Mapping[str, Any], layer: LayerTensors) -> dict[str, Leaf]:
    """compressed-tensors `nvfp4-pack-quantized`: two FP4 codes a byte, float8 scales and a float32."""
    return fp4(words, layer, ("F8_E4M3",)) | {"weight_global_scale": Leaf(("F32",), ((1,), ()))}


def gptq(words: Mapping[str, Any], layer: LayerTensors) -> dict[str, Leaf]:
    """GPTQ (`checkpoint_format: gptq`): codes in 32-bit words along the inputs, stored [in, out]."""
    packed, outputs = layer.shape("qweight", 2)
    inputs = layer.shape("g_idx", 1)[0] if "g_idx" in layer.leaves else packed * 32 // words["bits"]
    groups = _groups(inputs, words["group_size"])
    return {
        "qweight": Leaf(("I32",), ((_words(inputs, words["bits"]), outputs),)),
        "qzeros": Leaf(("I32",), ((groups, _words(outputs, words["bits"])),)),
        "scales": Leaf(FLOATS, ((groups, outputs),)),
        "g_idx": Leaf(("I32",), ((inputs,),), required=bool(words.get("desc_act"))),
    }


def awq(words: Mapping[str, Any], layer: LayerTensors) -> dict[str, Leaf]:
    """AutoAWQ (`version: gemm`): codes in 32-bit words along the outputs, stored [in, out]."""
    inputs, packed = layer.shape("qweight", 2)
    outputs = layer.shape("scales", 2)[1]
    groups = _groups(inputs, words.get("group_size", words.get("q_group_size", 128)))
    bits = words.get("bits", words.get("w_bit", 4))
    return {
        "qweight": Leaf(("I32",), ((inputs, _words(outputs, bits)),)),
        "qzeros": Leaf(("I32",), ((groups, packed),)),
        "scales": Leaf(FLOATS, ((groups, outputs),)),
    }


def bitsandbytes_4bit(words: Mapping[str, Any], layer: LayerTensors) -> dict[str, Leaf]:
    """bitsandbytes `Linear4bit`: two codes a byte in one column; `quant_state` has the sizes."""
    kind = words.get("bnb_4bit_quant_type", "fp4")
    state = f"weight.quant_state.bitsandbytes__{kind}"
    bytes_of_state = layer.shape(state, 1)
    told = json.loads(layer.read(state))
    elements = math.prod(told["shape"])
    blocks = math.ceil(elements / told["blocksize"])
    leaves = {
        "weight": Leaf(("U8",), ((math.ceil(elements / 2), 1),)),
        "weight.absmax": Leaf(("F32",), ((blocks,),)),
        "weight.quant_map": Leaf(("F32",), ((16,),)),
        state: Leaf(("U8",), (bytes_of_state,)),
    }
    if words.get("bnb_4bit_use_double_quant"):
        if "nested_blocksize" not in told:
            raise ValueError("config.json says bnb_4bit_use_double_quant, and its quant_state has no nested_blocksize")
        leaves["weight.absmax"] = Leaf(("U8",), ((blocks,),))
        leaves["weight.nested_absmax"] = Leaf(("F32",), ((math.ceil(blocks / told["nested_blocksize"]),),))
        leaves["weight.nested_quant_map"] = Leaf(("F32",), ((256,),))
    return leaves


def bitsandbytes_8bit(_words: Mapping[str, Any], layer: LayerTensors) -> dict[str, Leaf]:
    """bitsandbytes `Linear8bitLt`: int8 codes and one float32 scale for each output."""
    outputs, inputs = layer.shape("weight", 2)
    return {
        "weight": Leaf(("I8",), ((outputs, inputs),)),
        "SCB": Leaf(("F32",), ((outputs,),)),
        "weight_format": Leaf(("U8",), ((), (1,)), required=False),
    }


def _words(count: int, bits: int) -> int:
    return math.ceil(count * bits / 32)


def _groups(inputs: int, group_size: int | None) -> int:
    return math.ceil(inputs / group_size) if group_size and group_size > 0 else 1


def _scale_shapes(weights: Mapping[str, Any], outputs: int, inputs: int) -> tuple[Shape, ...]:
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy == "tensor":
        return (1,), ()
    if strategy == "channel":
        return ((outputs, 1),)
    if strategy in ("group", "tensor_group"):
        return ((outputs, _groups(inputs, weights["group_size"])),)
    if strategy == "block":
        rows, columns = weights["block_structure"]
        return ((math.ceil(outputs / rows), math.ceil(inputs / columns)),)
    raise ValueError(f"config.json says strategy {strategy}, which is none for weights")


def one_code_each(
    words: Mapping[str, Any], layer: LayerTensors, dtype: str, scale_dtypes: tuple[str, ...] = FLOATS
) -> dict[str, Leaf]:
    """A format of compressed-tensors with a code of `dtype` for each weight."""
    outputs, inputs = layer.shape("weight", 2)
    scales = _scale_shapes(words["weights"], outputs, inputs)
    leaves = {"weight": Leaf((dtype,), ((outputs, inputs),)), "weight_scale": Leaf(scale_dtypes, scales)}
    if not words["weights"].get("symmetric", True):
        leaves["weight_zero_point"] = Leaf((dtype,), scales)
    return leaves | _activations(words)


def fp4(words: Mapping[str, Any], layer: LayerTensors, scale_dtypes: tuple[str, ...]) -> dict[str, Leaf]:
    """A format of compressed-tensors with two FP4 codes a byte."""
    outputs, half = layer.shape("weight_packed", 2)
    leaves = {
        "weight_packed": Leaf(("U8",), ((outputs, half),)),
        "weight_scale": Leaf(scale_dtypes, _scale_shapes(words["weights"], outputs, 2 * half)),
    }
    return leaves | _activations(words)


def _activations(words: Mapping[str, Any]) -> dict[str, Leaf]:
    """Return the tensors of scales fixed before inference; those of dynamic ones are not stored."""
    leaves = {}
    one = ((1,), ())
    for side in ("input", "output"):
        scheme = words.get(f"{side}_activations")
        if not scheme or scheme.get("dynamic") is True:
            continue
        if scheme.get("strategy") == "tensor_group":
            leaves[f"{side}_global_scale"] = Leaf(("F32",), one)
        if scheme.get("dynamic") == "local":
            continue
        leaves[f"{side}_scale"] = Leaf(FLOATS, one)
        if not scheme.get("symmetric", True):
            leaves[f"{side}_zero_point"] = Leaf(("I8", *FLOATS), one)
    return leaves
