"""Draw the figures of these pages: each algorithm on one small layer with outliers, by optkit's own code.

python -m docs.understand.algorithms.draw            # from the repository's root; needs chromium
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from docs.benchmarks.drawing import drawn
from optkit.algorithms.eight_bit import FLOAT8, INT8, rounded_inputs
from optkit.algorithms.gptq import GptqOptions, gptq
from optkit.algorithms.grid import Grid, QuantizedWeight, minmax_scales, round_to_nearest
from optkit.algorithms.hadamard import random_rotation
from optkit.algorithms.packing import from_bytes
from optkit.algorithms.pruning import kept, wanda_scores
from optkit.algorithms.scale_search import search_scales
from optkit.algorithms.smoothing import smoothing_scales
from optkit.algorithms.sparsegpt import curvature, sparsegpt
from optkit.algorithms.state_codes import Float8Code
from optkit.onnx.weight_only import BlockForm, quantize_matrix
from optkit.page.charts.chart import PALETTE, Chart, Key, Mark, paint

FIGURES = Path(__file__).parents[1] / "figures"
WIDTH, TOKENS, OUTLIERS = 256, 2048, (17, 90, 203)
"""Inputs of the layer, which are also its outputs; tokens seen; inputs that are twenty times larger."""
OF_OUTPUTS, OF_VALUES = "error of the outputs, %", "error, %"
Lines = Mapping[str, Sequence[tuple[float, float]]]


def layer() -> tuple[Tensor, Tensor]:
    """Return weights, float32 [out, in], and correlated inputs with outliers, float32 [tokens, in]."""
    source = torch.Generator().manual_seed(0)
    mixed = torch.randn(TOKENS, WIDTH // 4, generator=source) @ torch.randn(WIDTH // 4, WIDTH, generator=source)
    inputs = mixed / WIDTH**0.25 + torch.randn(TOKENS, WIDTH, generator=source)
    inputs[:, OUTLIERS] *= 20
    return torch.randn(WIDTH, WIDTH, generator=source) / WIDTH**0.5, inputs


def main() -> None:
    """Write figures/NAME.svg beside these pages."""
    weight, inputs = layer()
    hessian = inputs.T @ inputs
    outputs = inputs @ weight.T

    def error(changed: Tensor, seen: Tensor = inputs) -> float:
        """Return the error of the outputs in percent of their norm."""
        return 100 * float((seen @ changed.T - outputs).norm() / outputs.norm())

    charts = {
        "gptq": _lines("Error of a layer's outputs by bits", "bits of a weight", by_bits(weight, hessian, error)),
        "awq": _lines("4 bits, scales = mean |x|^α", "α", by_power(weight, inputs, error)),
        "smoothquant": _lines("Weights and activations in 8 bits", "α", by_alpha(weight, inputs, error)),
        "pruning": _lines("Error of a layer's outputs by zeros", "zeros, %", by_zeros(weight, hessian, error)),
        "rotation": _channels(inputs),
        "nf4": _lines(
            "Error of normal weights in 4 bits", "weights that share a scale", by_code(), OF_VALUES, apart=True
        ),
        "fp8": _lines("What an outlier costs the other inputs", "outlier, times the rest", by_size(), OF_VALUES, "log"),
        "kv-cache": _lines(
            "Error by the scale of float8", "scale, times the exact one", by_scale(), OF_VALUES, apart=True
        ),
        "onnx": _lines("4 bits by onnx_quantize", "block_size", by_block(weight, error), apart=True),
    }
    for name, picture in drawn(charts).items():
        (FIGURES / f"{name}.svg").write_text(picture, encoding="utf-8")


def by_bits(weight: Tensor, hessian: Tensor, error: Callable[..., float]) -> Lines:
    """Return the error of each way to round, by bits."""
    paper = GptqOptions(scale_search="minmax", refinements=0)
    lines: dict[str, list[tuple[float, float]]] = {}
    for bits in (2, 3, 4, 8):
        grid = Grid(bits, 64, True)
        made = {
            "round to nearest": round_to_nearest(weight, *minmax_scales(weight, grid), grid),
            "scales searched": round_to_nearest(weight, *search_scales(weight, grid, hessian.diagonal()), grid),
            "GPTQ as in its paper": gptq(weight, hessian, grid, paper).weight,
            "optkit's GPTQ": gptq(weight, hessian, grid, GptqOptions()).weight,
        }
        for name, packed in made.items():
            lines.setdefault(name, []).append((bits, error(packed.dequantize())))
    return lines


def by_power(weight: Tensor, inputs: Tensor, error: Callable[..., float]) -> Lines:
    """Return the error at 4 bits, by the power of the activations that scales inputs."""
    grid, line = Grid(4, 64, True), []
    for step in range(21):
        scales = inputs.abs().mean(0) ** (step / 20)
        scaled = weight * scales
        rounded = round_to_nearest(scaled, *minmax_scales(scaled, grid), grid).dequantize() / scales
        line.append((step / 20, error(rounded)))
    return {"rounded to nearest after scaling": line}


def by_alpha(weight: Tensor, inputs: Tensor, error: Callable[..., float]) -> Lines:
    """Return the error with both in 8 bits, by who carries the outliers."""

    def rounded(values: Tensor) -> Tensor:
        step = values.abs().amax(1, keepdim=True) / 127
        return (values / step).round() * step

    line = []
    for step in range(21):
        scales = smoothing_scales(inputs.abs().amax(0), weight.abs().amax(0), step / 20)
        line.append((step / 20, error(rounded(weight * scales), rounded(inputs / scales))))
    return {"both rounded, token by token": line}


def by_zeros(weight: Tensor, hessian: Tensor, error: Callable[..., float]) -> Lines:
    """Return the error of each way to prune, by the share of zeros."""
    lines: dict[str, list[tuple[float, float]]] = {}
    curved, norms = curvature(hessian), hessian.diagonal().sqrt()
    for percent in range(10, 81, 10):
        share = percent / 100
        made = {
            "magnitude": weight * kept(weight.abs(), share, None, by_output=False),
            "Wanda": weight * kept(wanda_scores(weight, norms), share, None, by_output=True),
            "SparseGPT as in its paper": sparsegpt(weight, curved, share),
            "SparseGPT, refined": sparsegpt(weight, curved, share, refinements=10),
        }
        for name, pruned in made.items():
            lines.setdefault(name, []).append((percent, error(pruned)))
    return lines


def by_code() -> Lines:
    """Return the error of normal weights with each set of 16 values, by how many share a scale."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(64, 4 * WIDTH, generator=torch.Generator().manual_seed(0))
    lines: dict[str, list[tuple[float, float]]] = {}
    for size in (64, 128, 256, 512, 1024):
        grid = Grid(4, size, True)
        made = {
            "INT4, largest weight": round_to_nearest(weight, *minmax_scales(weight, grid), grid).dequantize(),
            "INT4, scales searched": round_to_nearest(weight, *search_scales(weight, grid), grid).dequantize(),
            "FP4": dequantize_4bit(*quantize_4bit(weight, blocksize=size, quant_type="fp4")),
            "NF4": dequantize_4bit(*quantize_4bit(weight, blocksize=size, quant_type="nf4")),
        }
        for name, rounded in made.items():
            lines.setdefault(name, []).append((size, _apart(rounded, weight)))
    return lines


def by_size() -> Lines:
    """Return the error of a token's other inputs, by how large one of them is."""
    inputs = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    lines: dict[str, list[tuple[float, float]]] = {"INT8": [], "FP8": []}
    for size in (3, 10, 30, 100, 300):
        inputs[:, 0] = size  # standard deviations of the rest
        for name, numbers in (("INT8", INT8), ("FP8", FLOAT8)):
            lines[name].append((size, _apart(rounded_inputs(inputs, numbers)[:, 1:], inputs[:, 1:])))
    return lines


def by_scale() -> Lines:
    """Return the error of keys in float8, by the scale relative to that of their largest."""
    keys = torch.randn(1, 1, TOKENS, 64, generator=torch.Generator().manual_seed(0))
    exact, line = float(keys.abs().max()) / FLOAT8.numbers.highest, []
    for power in range(-3, 13):
        code = Float8Code(exact * 2**power)
        line.append((2.0**power, _apart(code.decode(code.encode(keys), keys.dtype), keys)))
    return {"E4M3": line}


def by_block(weight: Tensor, error: Callable[..., float]) -> Lines:
    """Return the error of each way in which `onnx_quantize` rounds weights, by block."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for size in (16, 32, 64, 128, 256):
        for algorithm in ("rtn", "mse"):
            for symmetric in (True, False):
                form = BlockForm(4, size, symmetric, algorithm, 0)
                name = f"{algorithm}, {'symmetric' if symmetric else 'zero points'}"
                lines.setdefault(name, []).append((size, error(_of_blocks(weight, form))))
    return lines


def _of_blocks(weight: Tensor, form: BlockForm) -> Tensor:
    """Return what MatMulNBits computes with."""
    found = quantize_matrix(weight.T.contiguous().numpy(), form)
    scales = torch.from_numpy(found.scales)
    zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
    if found.zeros is not None:
        zeros = from_bytes(torch.from_numpy(found.zeros), form.bits, scales.shape[1])
    codes = from_bytes(torch.from_numpy(found.codes).flatten(1), form.bits, weight.shape[1])
    return QuantizedWeight(codes, scales, zeros, form.bits).dequantize()


def _apart(rounded: Tensor, values: Tensor) -> float:
    """Return the error in percent of the norm."""
    return 100 * float((rounded - values).norm() / values.norm())


def _lines(title: str, across: str, lines: Lines, up: str = OF_OUTPUTS, apart: bool = False) -> Chart:
    marks, keys = [], []
    for colour, (name, points) in zip(PALETTE, lines.items(), strict=False):
        data = [{"x": f"{x:g}" if apart else x, "y": y} for x, y in points]
        marks += [
            Mark("lineY", data, {"x": "x", "y": "y", "stroke": paint(colour), "strokeWidth": 1.8}),
            Mark("dot", data, {"x": "x", "y": "y", "fill": paint(colour), "r": 2.5}),
        ]
        keys.append(Key(name, colour, "line"))
    right = {"label": across} | ({"type": "point", "domain": [f"{x:g}" for x, _ in points]} if apart else {})
    upwards = {"label": up, "type": "log", "grid": True, "tickFormat": "~g"}
    return Chart("figure", title, marks, right, upwards, keys=keys if len(keys) > 1 else [], height=280)


def _channels(inputs: Tensor) -> Chart:
    token = inputs[0]
    shown = {"vermillion": token, "blue": random_rotation(WIDTH, 0).apply(token[None])[0]}
    marks = [
        Mark(
            "dot",
            [{"x": index, "y": abs(float(value))} for index, value in enumerate(values)],
            {"x": "x", "y": "y", "fill": paint(colour), "r": 2},
        )
        for colour, values in shown.items()
    ]
    keys = [Key("one token's activations", "vermillion"), Key("the same, rotated", "blue")]
    up = {"label": "|activation|", "grid": True}
    return Chart("figure", "A rotation spreads outliers", marks, {"label": "channel"}, up, keys=keys, height=260)


if __name__ == "__main__":
    main()
