"""What can be said of zeros without torch.
Whether layers can have them, what pruning takes in memory, and which engines profit.
"""

from __future__ import annotations

from collections.abc import Mapping

from optkit.algorithms.sparsity_pattern import Pattern
from optkit.errors import StageError
from optkit.model.calibration_memory import Text, Work, calibrated_work, float_bytes, hessian_bytes
from optkit.model.linear_layers import Layer
from optkit.model.shape import ModelShape

LEVELS = 9
"""Sparsities that each layer may get if they are chosen by sensitivity."""
FLOAT_BYTES = 4


def refuse_unfit(layers: Mapping[str, Layer], pattern: Pattern | None, low: float, high: float, stage: str) -> None:
    """Raise StageError if a pattern does not divide the inputs of a layer.
    The sparsities from `low` to `high` may not leave all or none either.
    """
    if pattern is not None:
        _refuse_uneven(layers, pattern, stage)
        return
    for layer in layers.values():
        zeros = round(high * layer.inputs)
        if zeros == layer.inputs or round((low + high) / 2 * layer.inputs) == 0:
            what = "none" if zeros == layer.inputs else "all"
            raise StageError(
                f"a sparsity of {high:g} leaves {what} of the {layer.inputs} weights of an output",
                where=layer.name,
                remedy=f"{'Lower' if what == 'none' else 'Raise'} {stage}.sparsity, or exclude the layer",
            )


def _refuse_uneven(layers: Mapping[str, Layer], pattern: Pattern, stage: str) -> None:
    wrong = [layer for layer in layers.values() if layer.inputs % pattern.of]
    if wrong:
        others = f", nor are those of {len(wrong) - 1:,} other layers" if len(wrong) > 1 else ""
        raise StageError(
            f"{wrong[0].inputs} inputs are not a multiple of {pattern.of}{others}",
            where=wrong[0].name,
            why=f"The pattern {pattern} is of {pattern.of} neighbouring inputs",
            remedy=f"Exclude the layer, or set {stage}.pattern: unstructured",
        )


def engines_note(pattern: Pattern | None, sparsity: float, layers: int) -> str:
    """Return what the zeros of so many layers are worth when the model runs."""
    if pattern is None:
        return (
            f"{sparsity:.1%} of the weights of {layers:,} layers are 0, in no pattern: no engine "
            "that optkit measures (torch,"
            " transformers, vLLM, ONNX Runtime) reads or computes less for it; the model is as "
            "large and as slow as before"
        )
    if (pattern.zeros, pattern.of) != (2, 4):
        return (
            f"{layers:,} layers are {pattern} sparse, and no engine that optkit measures has a kernel "
            "for it (GPUs know 2:4); the model is as large and as slow as before"
        )
    return (
        f"{layers:,} layers are 2:4 sparse, which no engine that optkit exports to uses by itself: "
        "vLLM removed its 2:4 kernels and compressed-tensors its 2:4 formats in 2026. On NVIDIA GPUs since Ampere "
        "torch.sparse.to_sparse_semi_structured does for bfloat16"
        " and float16 linear layers (tests/benchmarks/sparse24_gpu.py measures them); CPUs gain nothing"
    )


def pruning_memory(
    shape: ModelShape, layers: Mapping[str, Layer], method: str, text: Text | None, batch: int, devices: int = 1
) -> Work:
    """Return what pruning works with. `batch`: sequences of its calibration at once, which `devices` share."""
    copies, sums = 7 if method == "sparsegpt" else 5, 0
    work = FLOAT_BYTES * copies * max(layer.outputs * layer.inputs for layer in layers.values())
    if method == "magnitude" or text is None:
        return Work(shape.block_bytes + max(work, shape.block_bytes))
    widest, activation = max(layer.inputs for layer in layers.values()), FLOAT_BYTES
    if method == "sparsegpt":
        sums = hessian_bytes(shape, layers, at_once=text.experts == "all")
        work += 3 * FLOAT_BYTES * widest**2
    elif (activation := float_bytes(shape)) < FLOAT_BYTES:  # inputs are squared in float32
        sums = FLOAT_BYTES * min(batch, text.size[0]) * text.size[1] * widest
    return calibrated_work(shape, layers, text, batch, sums, max(work, shape.block_bytes), devices, activation)
