"""What an export will leave, known from the shapes of its source; no torch and no onnx is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optkit.model.packed_floats import DTYPES
from optkit.model.packed_names import CODES
from optkit.model.shape import DTYPE_BITS, ModelShape, TensorInfo
from optkit.model.text_config import text_config
from optkit.onnx.builder import Order
from optkit.onnx.matmul_nbits_limits import head_group_size

BYTES_OF_CODES = (*CODES, "weight_zero_point", "qzeros")
GONE = ("weight_shape", "weight_g_idx", "g_idx")
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"

COMPARED = ((1, 1), (1, 7), (2, 33), (3, 64))
"""Batch and length of the sequences; one longer sequence is added, and read once more through the
KV cache.
"""
LONG, LONGEST = 256, 2048
"""Its length, and the most tokens that it may have to reach beyond a sliding window."""
BEYOND_WINDOW = 32
TEMPORARIES = 3
"""Tensors of the size of a sequence's logits at once: the graph's, the difference, its absolute
values.
"""


def exported_shape(shape: ModelShape, order: Order) -> ModelShape:
    """Return config and tensors of the graph, all floats in the graph's dtype.
    Codes and zero points keep the bytes that they have.
    """
    dtype = DTYPES[order.dtype]
    tensors: dict[str, TensorInfo] = {}
    tied = is_tied(shape)
    embedding = next((name for name in shape.tensors if name.endswith(EMBEDDING)), "")
    for name, info in shape.tensors.items():
        leaf = name.rpartition(".")[2]
        if (
            leaf in GONE
            or (name == HEAD and (tied or order.head_bits))
            or (name == embedding and order.shared_embedding)
        ):
            continue
        coded = leaf in BYTES_OF_CODES
        tensors[name] = TensorInfo("U8", (info.size_bytes,)) if coded else TensorInfo(dtype, info.shape)
    if order.head_bits:
        tensors |= _rounded(shape.tensors[HEAD if HEAD in shape.tensors else embedding], order.head_bits, dtype)
    return ModelShape(config=exported_config(shape.config, order.dtype), tensors=tensors | _rotary(shape, dtype))


def float32_shape(shape: ModelShape) -> ModelShape:
    """Return config and tensors of a graph in float32 with the weights of its source and no others."""
    kept = {
        name: TensorInfo("F32", info.shape)
        for name, info in shape.tensors.items()
        if not (name == HEAD and is_tied(shape))
    }
    return ModelShape(config=exported_config(shape.config, "float32"), tensors=kept)


def is_tied(shape: ModelShape) -> bool:
    """Whether lm_head is the embedding; if config.json is silent, whether lm_head is missing."""
    said = shape.config.get("tie_word_embeddings")
    return bool(said) if said is not None else not any(name.startswith("lm_head.") for name in shape.tensors)


def exported_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return config.json of an exported model, with the dtype of the graph.
    It is the source's without the form of quantized layers.
    """
    left = {name: value for name, value in config.items() if name not in ("quantization_config", "torch_dtype")}
    return left | {"dtype": dtype}


def compared_shapes(positions: int | None, window: int | None) -> list[tuple[int, int]]:
    """Return batch and length of the sequences on which graph and source are compared.
    The last one is the longest.
    """
    long = min(window + BEYOND_WINDOW, LONGEST) if window and window < LONGEST else LONG
    return [(batch, min(length, positions or length)) for batch, length in (*COMPARED, (1, max(long, LONG)))]


def comparing_bytes(shape: ModelShape, weights: int, graph: int, rounds: bool) -> int:
    """Return the peak of memory while graph and source are compared.

    The logits of all sequences are kept of the source, twice if the graph `rounds`; the graph's
    of the longest one, and what its difference is made of, come beside them.
    """
    config: Mapping[str, Any] = text_config(shape.config)
    shapes = compared_shapes(shape.positions, config.get("sliding_window"))
    row = 4 * int(config.get("vocab_size") or 0)
    kept = row * sum(batch * length for batch, length in shapes)
    longest = row * max(batch * length for batch, length in shapes)
    return max(weights + kept, graph + (2 if rounds else 1) * kept + TEMPORARIES * longest)


def bytes_while_compared(shape: ModelShape) -> int:
    """Return the source's bytes while it is compared: floats in float32, codes as they are."""
    wide = DTYPE_BITS["F32"] // 8
    sizes = (
        info.size_bytes if name.rpartition(".")[2] in BYTES_OF_CODES else info.elements * wide
        for name, info in shape.tensors.items()
    )
    return sum(sizes)


def _rounded(info: TensorInfo, bits: int, dtype: str) -> dict[str, TensorInfo]:
    outputs, inputs = info.shape
    groups = inputs // head_group_size(inputs, bits)
    return {
        "lm_head.qweight": TensorInfo("U8", (outputs, inputs * bits // 8)),
        "lm_head.scales": TensorInfo(dtype, (outputs, groups)),
        "lm_head.qzeros": TensorInfo("U8", (outputs, -(-groups * bits // 8))),
    }


def _rotary(shape: ModelShape, dtype: str) -> dict[str, TensorInfo]:
    config = shape.config
    heads = int(config.get("num_attention_heads") or 1)
    width = int(config.get("head_dim") or int(config.get("hidden_size") or 0) // heads)
    table = TensorInfo(dtype, (shape.positions or 0, width // 2))
    return {"cos_cache": table, "sin_cache": table}
