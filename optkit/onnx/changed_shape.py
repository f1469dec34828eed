"""What `onnx_quantize` and `onnx_optimize` will leave and need, from their source's shapes.
Neither torch nor onnx is needed.

The source is an ONNX directory (`model.onnx_shape`) or what `onnx` will leave
(`prediction.exported_shape`). So tensors are told by their names and shapes, and names of nodes are
not known. A pattern that matches no tensor is taken to match none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from optkit.model.shape import ModelShape, TensorInfo
from optkit.model.task import GENERATING
from optkit.onnx.prediction import is_tied

LIBRARY_BYTES = 350_000_000
"""What torch and ONNX Runtime take."""
FLOATS = ("F32", "F16", "BF16")
TABLES = ("cos_cache", "sin_cache")
EMBEDDINGS = ("embed", "wte", "wpe", "shared.weight")
HEAD = "lm_head"
HEADS = (HEAD, "proj_out")
BYTES_OF_A_WEIGHT = {"rtn": 22, "mse": 16, "k_quant": 64, "hqq": 72}
"""Algorithm -> memory for each weight of a slice."""
SLICE_ELEMENTS = 1 << 24
"""Weights that are rounded at once (`weight_only.SLICE_ELEMENTS`)."""
OPENED = 2.0
"""Memory of ONNX Runtime with a model open, beside what its file takes: weights are packed anew."""


@dataclass(frozen=True)
class Blocks:
    """How a matrix is stored."""

    bits: int
    block_size: int
    zero_points: str
    """`none`, `packed` or `float`."""


def rounded_shape(
    shape: ModelShape, form: Blocks, head: Blocks | None, shared: bool, include: Iterable[str], exclude: Iterable[str]
) -> ModelShape:
    """Return the tensors with matrices in blocks.
    `head` None leaves lm_head as it is; `shared` lets the embedding read its codes.
    """
    tensors = dict(shape.tensors)
    tied = tied_matrix(shape)
    for name, info in matrices(shape, include, exclude).items():
        chosen = head if HEAD in name else form
        if chosen and name != tied:
            del tensors[name]
            tensors |= _stored(name, info, chosen)
    if tied:
        if head:
            tensors |= _stored(HEAD, shape.tensors[tied], head)
        if shared:
            del tensors[tied]
    return ModelShape(config=shape.config, tensors=tensors)


def int8_shape(
    shape: ModelShape, per_channel: bool, embeddings: bool, include: Iterable[str], exclude: Iterable[str]
) -> ModelShape:
    """Return the tensors with matrices, and if asked embeddings, in int8 with scales and zeros."""
    tensors = dict(shape.tensors)
    found = matrices(shape, include, exclude, embeddings)
    if tied := tied_matrix(shape):
        found[HEAD] = shape.tensors[tied]
        found = {name: info for name, info in found.items() if name != tied or embeddings}
    for name, info in found.items():
        tensors.pop(name, None)
        channels = info.shape[-1] if per_channel else 1
        tensors[f"{name}_quantized"] = TensorInfo("I8", info.shape)
        tensors |= {
            f"{name}_scale": TensorInfo("F32", (channels,)),
            f"{name}_zero_point": TensorInfo("I8", (channels,)),
        }
    return ModelShape(config=shape.config, tensors=tensors)


def optimized_shape(shape: ModelShape, folded: bool, float16: bool) -> ModelShape:
    """Return the tensors after fusions and conversion.
    The fusions turn the embedding that lm_head reads into a matrix of its own.
    """
    tensors = dict(shape.tensors)
    if folded and (tied := tied_matrix(shape)):
        tensors[f"{HEAD}.weight"] = shape.tensors[tied]
    if float16:
        tensors = {
            name: TensorInfo("F16", each.shape) if each.dtype == "F32" else each for name, each in tensors.items()
        }
    return ModelShape(config={**shape.config, "dtype": "float16"} if float16 else shape.config, tensors=tensors)


def rounding_bytes(shape: ModelShape, left: ModelShape, algorithm: str) -> int:
    """Return the memory of rounding in blocks: the widest slice, then the written model, opened."""
    widest = max((min(each.elements, SLICE_ELEMENTS) for each in _matrices_and_head(shape)), default=0)
    return LIBRARY_BYTES + max(widest * BYTES_OF_A_WEIGHT[algorithm], round(left.size_bytes * OPENED))


def whole_bytes(shape: ModelShape, copies: float) -> int:
    """Return the memory of a tool of ONNX Runtime that holds the whole model so often."""
    return LIBRARY_BYTES + round(optimized_shape(shape, folded=True, float16=False).size_bytes * copies)


def matrices(
    shape: ModelShape, include: Iterable[str], exclude: Iterable[str], embeddings: bool = False
) -> dict[str, TensorInfo]:
    """Return the chosen weights of matrix products by name; with `embeddings` those too."""
    return {
        name: info
        for name, info in shape.tensors.items()
        if _is_matrix(name, info)
        and (embeddings or not _is_embedding(name))
        and any(fnmatchcase(name, pattern) for pattern in include)
        and not any(fnmatchcase(name, pattern) for pattern in exclude)
    }


def tied_matrix(shape: ModelShape) -> str:
    """Return the name of the matrix that is both embedding and lm_head; empty if they are two."""
    ends = [
        name
        for name, each in shape.tensors.items()
        if _is_matrix(name, each) and (_is_embedding(name) or any(head in name for head in HEADS))
    ]
    ends = [name for name in ends if shape.config.get("vocab_size") in shape.tensors[name].shape]
    tied = (
        shape.task in GENERATING
        and len(ends) == 1
        and (_is_embedding(ends[0]) or shape.config.get("tie_word_embeddings"))
    )
    return ends[0] if tied and (not _is_embedding(ends[0]) or is_tied(shape)) else ""


def _matrices_and_head(shape: ModelShape) -> list[TensorInfo]:
    tied = tied_matrix(shape)
    return [*matrices(shape, ["*"], []).values(), *([shape.tensors[tied]] if tied else [])]


def _is_matrix(name: str, info: TensorInfo) -> bool:
    return info.dtype in FLOATS and len(info.shape) == 2 and not name.endswith(TABLES)


def _is_embedding(name: str) -> bool:
    return any(part in name.lower() for part in EMBEDDINGS)


def _stored(name: str, info: TensorInfo, form: Blocks) -> Mapping[str, TensorInfo]:
    blocks = -(-info.elements // form.block_size)
    found = {
        f"{name}_codes": TensorInfo("U8", (blocks * form.block_size * form.bits // 8,)),
        f"{name}_scales": TensorInfo(info.dtype, (blocks,)),
    }
    if form.zero_points == "packed":
        found[f"{name}_zeros"] = TensorInfo("U8", (-(-blocks * form.bits // 8),))
    elif form.zero_points == "float":
        found[f"{name}_zeros"] = TensorInfo(info.dtype, (blocks,))
    return found
