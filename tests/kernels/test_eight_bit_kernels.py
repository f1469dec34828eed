"""Layers of 8-bit weights compute what their codes, scales and rounded inputs say, and checkpoints
that do not fit are refused.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from optkit.algorithms.eight_bit import FLOAT8, INT8, NumberFormat, amax_scales, quantize
from optkit.errors import SourceError
from optkit.kernels import float8_linear, int8_linear
from optkit.kernels.float8_linear import Float8Linear, WidenedLinear
from optkit.kernels.int8_linear import Int8Linear
from optkit.kernels.quant_methods import quantized_layers
from optkit.model.checkpoint import Checkpoint
from optkit.session import open_session
from optkit.stages.fp8 import Fp8
from tests.conftest import TinyModel
from tests.support.running import run_stage

OUTPUTS, INPUTS = 48, 160


def parts(numbers: NumberFormat, tile: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and the weight that they stand for, float64, of a random layer."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator)
    scales = amax_scales(weight, tile, numbers, torch.float32)
    codes = quantize(weight, scales, tile, numbers)
    spread = scales.repeat_interleave(tile[0], 0)[:OUTPUTS].repeat_interleave(tile[1], 1)[:, :INPUTS]
    return codes, scales, codes.double() * spread


def rounded(hidden: Tensor, numbers: NumberFormat, group: int | None, scale: Tensor | None) -> Tensor:
    """Return what inputs become once rounded, float64; written out group by group."""
    values = hidden.double()
    if scale is not None:
        return numbers.round((values / scale.double()).float()).double() * scale.double()
    pieces = []
    for piece in values.split(group or INPUTS, dim=-1):
        step = piece.abs().amax(-1, keepdim=True) / numbers.reach
        pieces.append(numbers.round((piece / step).float()).double() * step)
    return torch.cat(pieces, -1)


def error(layer: nn.Module, hidden: Tensor, expected: Tensor) -> float:
    with torch.inference_mode():
        found = layer(hidden)
    assert found.dtype == hidden.dtype
    assert found.shape == expected.shape
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", [Int8Linear, Float8Linear])
@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 6e-3), (torch.float16, 3e-3)])
def test_products_of_codes(kind: Any, static: bool, per_tensor: bool, dtype: torch.dtype, tolerance: float) -> None:
    numbers = INT8 if kind is Int8Linear else FLOAT8
    codes, scales, weight = parts(numbers, (OUTPUTS, INPUTS) if per_tensor else (1, INPUTS))
    scale, bias = torch.tensor([0.03]) if static else None, torch.randn(OUTPUTS)
    layer = kind(codes, scales, scale, bias, dtype)
    for rows in (1, 20):
        hidden = (torch.randn(2, rows, INPUTS) * 3).to(dtype)
        expected = rounded(hidden, numbers, None, scale) @ weight.T + bias.double()
        assert error(layer, hidden, expected) < tolerance
        assert error(layer, hidden[0], expected[0]) < tolerance  # as an expert is given its tokens


@pytest.mark.parametrize("group", [None, 32, INPUTS])
@pytest.mark.parametrize("tile", [(128, 128), (16, 32), (1, INPUTS)])
def test_dequantized_weights(tile: tuple[int, int], group: int | None) -> None:
    codes, scales, weight = parts(FLOAT8, tile)
    layer = WidenedLinear(codes, scales, tile, group, torch.randn(OUTPUTS), torch.float32)
    hidden = torch.randn(3, 5, INPUTS)
    inputs = hidden.double() if group is None else rounded(hidden, FLOAT8, group, None)
    assert layer.bias is not None
    assert error(layer, hidden, inputs @ weight.T + layer.bias.double()) < 2e-3


def test_integers_are_exact_and_their_emulation_is_too(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scales, _ = parts(INT8, (1, INPUTS))
    hidden = torch.randn(7, INPUTS)
    integers = Int8Linear(codes, scales, None, None, torch.float32)
    assert integers.integers
    monkeypatch.setattr(int8_linear, "_why_unavailable", lambda device: "there is none")
    floats = Int8Linear(codes, scales, None, None, torch.float32)
    assert not floats.integers
    assert torch.equal(integers(hidden), floats(hidden))  # sums of 160 products of 8 bits are below 2^24


@pytest.mark.parametrize(("module", "product"), [(int8_linear, "integer_product"), (float8_linear, "_product")])
def test_a_product_that_is_wrong_is_not_used(module: Any, product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, product, lambda codes, weight, *_: torch.zeros(len(codes), len(weight), dtype=torch.int32)
    )
    if module is float8_linear:
        monkeypatch.setattr(module, "_is_capable", lambda device: True)
    assert "does not compute here what it is documented to" in str(module._why_unavailable.__wrapped__("cpu"))

    def fail(*_: Any) -> None:
        raise RuntimeError("not implemented\nfor CPU")

    monkeypatch.setattr(module, product, fail)
    assert "fails: not implemented" in str(module._why_unavailable.__wrapped__("cpu"))


def test_reasons_against_fast_products() -> None:
    assert int8_linear.why_not_integers(48, 160, "cpu") is None
    assert "multiples of 8 outputs and inputs on CUDA, not 9 x 160" in str(int8_linear.why_not_integers(9, 160, "cuda"))
    assert int8_linear.why_not_integers(8, 8, "xpu") == "torch._int_mm is not used on xpu"
    assert "multiples of 16 outputs and inputs, not 40 x 160" in str(float8_linear.why_not_scaled(40, 160, "cpu"))
    assert "compute capability 8.9" in str(float8_linear.why_not_scaled(48, 160, "cpu"))


def stored(tiny_model: TinyModel, target: Path, **fields: Any) -> tuple[Path, dict[str, Any]]:
    """Return a directory of 8-bit floats and its config."""
    run_stage(Fp8(**fields), tiny_model("llama"), target)
    return target, json.loads((target / "config.json").read_text())


def test_what_is_not_known_is_left_to_transformers(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory, config = stored(tiny_model, tmp_path / "fp8")
    group = config["quantization_config"]["config_groups"]["group_0"]
    inputs = group["input_activations"]
    unknown: list[tuple[str, dict[str, Any]]] = [
        ("weights", {"symmetric": False}),
        ("weights", {"strategy": "group", "group_size": 32}),
        ("weights", {"num_bits": 4}),
        ("weights", {"strategy": "block", "block_structure": [16, 16]}),
        ("input_activations", {"symmetric": False}),
        ("input_activations", {"type": "int"}),
        ("input_activations", {"strategy": "tensor"}),
        ("input_activations", {"dynamic": "local"}),
    ]
    for part, change in unknown:
        group["input_activations"] = (
            {**inputs, "strategy": "tensor", "dynamic": False} if change.get("strategy") == "block" else inputs
        )
        changed = {**group, part: {**group[part], **change}}
        config["quantization_config"]["config_groups"] = {"group_0": changed}
        (directory / "config.json").write_text(json.dumps(config))
        assert quantized_layers(Checkpoint(directory)) is None, change


def test_tensors_that_do_not_fit(tiny_model: TinyModel, tmp_path: Path) -> None:
    layer = "model.layers.0.mlp.up_proj"
    directory, config = stored(tiny_model, tmp_path / "fp8")
    tensors = load_file(directory / "model.safetensors")

    def broken(**changed: Tensor | None) -> Path:
        kept = {**tensors, **{f"{layer}.{leaf}": tensor for leaf, tensor in changed.items()}}
        save_file(
            {name: tensor for name, tensor in kept.items() if tensor is not None}, directory / "model.safetensors"
        )
        return directory

    with pytest.raises(SourceError, match=r"up_proj: there is no weight_scale"):
        open_session(broken(weight_scale=None))
    with pytest.raises(
        SourceError, match=r"up_proj: scales \[3, 1\] are not those of 128 x 1 tiles of a weight \[128, 64\]\. Make the"
    ):
        open_session(broken(weight_scale=torch.ones(3, 1)))
    broken()
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] |= {"strategy": "tensor", "dynamic": False}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=r"there is no input_scale"):
        open_session(directory)
    group["input_activations"] |= {"strategy": "group", "group_size": 48, "dynamic": True}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=r"inputs are not a multiple of the 48 that share a scale"):
        open_session(directory)


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({}, "fp8: 21 of 21 layers are widened at each call, because 8-bit floats are multiplied by NVIDIA GPUs"),
        ({"activations": "none"}, "fp8: 21 of 21 layers are dequantized at each call, inputs are not rounded"),
    ],
)
def test_notes_say_what_computes(fields: dict[str, Any], note: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    directory, _ = stored(tiny_model, tmp_path / "fp8", **fields)
    session = open_session(directory)
    assert session.notes[0].startswith(note)
    plain = open_session(tiny_model("llama"))
    layers = 3 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)
    scales = 3 * (64 + 2 * 32 + 64 + 2 * 128 + 64) * 4
    # a byte and a scale instead of four bytes
    assert plain.decode_bytes(1, 1) - session.decode_bytes(1, 1) == 3 * layers - scales
    assert torch.equal(session.generate(torch.arange(5, 9)[None], 4)[:, :4], torch.arange(5, 9)[None])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Int8Linear, Float8Linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(kind: Any, dtype: torch.dtype) -> None:
    numbers = INT8 if kind is Int8Linear else FLOAT8
    codes, scales, weight = parts(numbers, (1, INPUTS))
    bias = torch.randn(OUTPUTS)
    layer = kind(codes.cuda(), scales.cuda(), None, bias.cuda(), dtype)
    assert (
        layer.integers
        if kind is Int8Linear
        else layer.scaled or torch.cuda.get_device_capability() < float8_linear.CAPABILITY
    )
    for rows in (1, 17, 300):
        hidden = (torch.randn(2, rows, INPUTS) * 3).to(dtype)
        expected = rounded(hidden, numbers, None, None) @ weight.T + bias.double()
        found = layer(hidden.cuda()).double().cpu()
        assert float((found - expected).norm() / expected.norm()) < 8e-3
