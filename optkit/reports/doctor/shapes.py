"""Matrix sizes that tensor cores or packed kernels dislike: no multiples of 8, 16 or 64.

NVIDIA, Matrix Multiplication Background User's Guide: tensor cores take 16 bytes at once. So sizes
should be multiples of 8 in 16 bits and of 16 in 8 bits, best of 64 and 128 (128 bytes).
https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication
"""

from __future__ import annotations

from collections.abc import Iterator

from optkit.common.frozen import Frozen
from optkit.model.linear_layers import Layer, layers_of, matrices_of
from optkit.model.shape import ModelShape, without_indices

HEADS = ("lm_head", "embed_out", "output")
TABLES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
FLOATS, BYTES, TILE, GROUP = 8, 16, 64, 128
"""Multiples: of 16-bit products, of 8-bit ones, of what is fastest, and of the usual group of INT4."""


class ShapeProblem(Frozen):
    """Matrices of one shape that something does not like."""

    layers: str
    """Their name, with * for the index of a block."""
    count: int
    outputs: int
    inputs: int
    problem: str
    """What happens, and what to do."""


def shape_problems(shape: ModelShape) -> tuple[ShapeProblem, ...]:
    """Return the matrices whose sizes cost speed or refuse a kernel, those of all blocks together."""
    found: dict[tuple[str, int, int], int] = {}
    for layer in (*layers_of(shape).values(), *_heads(shape)):
        key = (without_indices(layer.name), layer.outputs, layer.inputs)
        found[key] = found.get(key, 0) + 1
    return tuple(
        ShapeProblem(layers=name, count=count, outputs=outputs, inputs=inputs, problem=problem)
        for (name, outputs, inputs), count in found.items()
        for problem in _problems(name, outputs, inputs)
    )


def _problems(name: str, outputs: int, inputs: int) -> Iterator[str]:
    is_head = name.rpartition(".")[2] in HEADS
    odd = [size for size in (outputs, inputs) if size % FLOATS]
    if odd:
        pad = f"pad the vocabulary to {_padded(outputs)} (resize_token_embeddings(pad_to_multiple_of={TILE}))"
        cure = pad if is_head else "none"
        yield f"{_sizes(odd)} no multiple of {FLOATS}: 16-bit products use slower kernels. Cure: {cure}"
    elif bad := [size for size in (outputs, inputs) if size % BYTES]:
        yield f"{_sizes(bad)} no multiple of {BYTES}: products in fp8 and int8 widen the weights at each call instead"
    elif slow := [size for size in (outputs, inputs) if size % TILE]:
        yield f"{_sizes(slow)} no multiple of {TILE}: the last tile of a product is computed in vain"
    if inputs % GROUP and not is_head:
        fitting = next((size for size in (64, 32) if inputs % size == 0), -1)
        yield f"groups of {GROUP} do not fit {inputs:,} inputs: quantize with group_size: {fitting}"


def _heads(shape: ModelShape) -> Iterator[Layer]:
    """Yield lm_head, or the embedding if that is lm_head too."""
    own = [layer for name, layer in matrices_of(shape).items() if name.rpartition(".")[2] in HEADS]
    yield from own
    for name, info in shape.tensors.items():
        if not own and name.endswith(TABLES) and len(info.shape) == 2:
            yield Layer("lm_head", *info.shape, transposed=False)


def _sizes(sizes: list[int]) -> str:
    return " and ".join(f"{size:,}" for size in dict.fromkeys(sizes)) + (" is" if len(set(sizes)) == 1 else " are")


def _padded(size: int) -> str:
    return f"{-(-size // TILE) * TILE:,}"
