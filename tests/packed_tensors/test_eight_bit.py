"""8-bit weights: the bytes of compressed-tensors, the best scales, and what they come back as."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.algorithms.eight_bit import (
    FLOAT8,
    INT8,
    NumberFormat,
    amax_scales,
    dequantize,
    float8_values,
    quantize,
    round_inputs,
    search_scales,
    tile_of,
)
from optkit.packed_tensors.eight_bit import EightBitFormat

FORMATS = {"float": FLOAT8, "int": INT8}


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)


def peers_arguments(number: str, granularity: str) -> Any:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = EightBitFormat(number, granularity, "none").scheme()["weights"]  # type: ignore[arg-type]
    return quantization.QuantizationArgs(**scheme)


@pytest.mark.parametrize("number", ["float", "int"])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize("shape", [(16, 32), (200, 300), (1, 5)])
def test_bytes_and_scales_equal_compressed_tensors(number: str, granularity: str, shape: tuple[int, int]) -> None:
    arguments = peers_arguments(number, granularity)
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    values, tile = weight(*shape), tile_of(granularity, shape)  # type: ignore[arg-type]
    scales = amax_scales(values, tile, FORMATS[number], torch.float32)
    corners = [
        values[row : row + tile[0], column : column + tile[1]]
        for row in range(0, shape[0], tile[0])
        for column in range(0, shape[1], tile[1])
    ]
    low, high = (torch.stack([torch.aminmax(corner)[end] for corner in corners]) for end in (0, 1))
    theirs, _ = calculate_qparams(low, high, arguments)
    torch.testing.assert_close(scales.flatten(), theirs.flatten(), rtol=1e-6, atol=0)
    compressor = compressors.BaseCompressor.get_value_from_registry(f"{number}-quantized")
    stored = scales.view(-1) if granularity == "tensor" else scales
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    packed = compressor.compress({"weight": values, "weight_scale": stored}, scheme)
    ours = quantize(values, scales, tile, FORMATS[number])
    assert ours.dtype == packed["weight"].dtype
    assert torch.equal(ours.view(torch.int8), packed["weight"].view(torch.int8))
    if granularity != "block" or all(side % 128 == 0 for side in shape):
        unpacked = compressor.decompress(packed, scheme)["weight"]
        torch.testing.assert_close(dequantize(ours, scales, tile), unpacked, rtol=1e-6, atol=0)


@settings(max_examples=40)
@given(
    rows=st.integers(1, 150),
    columns=st.integers(1, 150),
    granularity=st.sampled_from(("tensor", "channel", "block")),
    number=st.sampled_from(("float", "int")),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    seed=st.integers(0, 99),
)
def test_what_was_on_the_grid_comes_back(
    rows: int, columns: int, granularity: Any, number: str, dtype: torch.dtype, seed: int
) -> None:
    """Codes times scales are rounded to the very same codes again, and no value moves by more than
    half a step.
    """
    values, tile, numbers = weight(rows, columns, seed), tile_of(granularity, (rows, columns)), FORMATS[number]
    scales = amax_scales(values, tile, numbers, dtype)
    assert torch.equal(scales, scales.to(dtype).float())
    codes = quantize(values, scales, tile, numbers)
    assert codes.shape == values.shape
    back = dequantize(codes, scales, tile)
    assert torch.equal(quantize(back, scales, tile, numbers).float(), codes.float())
    spread = scales.repeat_interleave(tile[0], 0)[:rows].repeat_interleave(tile[1], 1)[:, :columns]
    step = spread if number == "int" else torch.maximum(back.abs() / 8, spread * 2.0**-9)
    assert bool(((back - values).abs() <= 0.51 * step + 0.01 * values.abs()).all())


@pytest.mark.parametrize("number", ["float", "int"])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_searched_scales_are_never_worse(number: str, granularity: Any) -> None:
    torch.manual_seed(0)
    values, numbers = weight(140, 200), FORMATS[number]
    tile = tile_of(granularity, (140, 200))

    def error(scales: torch.Tensor) -> float:
        return float((dequantize(quantize(values, scales, tile, numbers), scales, tile) - values).square().sum())

    widest, searched = (find(values, tile, numbers, torch.float32) for find in (amax_scales, search_scales))
    assert error(searched) < error(widest) or (torch.equal(searched, widest) and granularity != "block")


def test_zeros_and_scales_below_the_dtype() -> None:
    values = torch.zeros(3, 4)
    values[1] = 1e-9
    values[2] = 6e4
    scales = amax_scales(values, (1, 4), INT8, torch.float16)
    assert scales.flatten().tolist() == [1.0, 2.0**-20, pytest.approx(6e4 / 127.5, rel=1e-3)]
    assert quantize(values, scales, (1, 4), INT8)[:2].tolist() == [[0] * 4] * 2


def test_every_number_of_e4m3_is_widened_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expected = codes.to(dtype)
        known = ~expected.isnan()
        assert torch.equal(float8_values(codes, dtype)[known], expected[known])
        assert int(known.sum()) == 254


@pytest.mark.parametrize("numbers", [FLOAT8, INT8])
@pytest.mark.parametrize("group", [None, 16])
def test_inputs_are_rounded_token_by_token(numbers: NumberFormat, group: int | None) -> None:
    rows = torch.randn(6, 64) * torch.tensor([0.0, 1e-6, 1e-3, 1, 1e3, 1e6]).unsqueeze(1)
    codes, scales = round_inputs(rows, numbers, group)
    assert scales.shape == (6, 64 // (group or 64))
    for row, line, scale in zip(rows, codes, scales, strict=True):
        for part, code, each in zip(row.view(len(scale), -1), line.view(len(scale), -1), scale, strict=True):
            expected = part.abs().max() / (448 if numbers is FLOAT8 else 127.5)
            assert float(each) == pytest.approx(max(float(expected), 2.0**-100))
            assert torch.equal(code.float(), numbers.round(part / each).float())
    assert not codes[0].float().any()


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (EightBitFormat("float", "channel", "dynamic"), "FP8_DYNAMIC"),
        (EightBitFormat("float", "tensor", "static"), "FP8"),
        (EightBitFormat("float", "block", "dynamic"), "FP8_BLOCK"),
        (EightBitFormat("int", "channel", "dynamic"), "W8A8"),
    ],
)
def test_schemes_are_the_presets_of_compressed_tensors(form: EightBitFormat, expected: str) -> None:
    schemes = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    ours = schemes.QuantizationScheme(targets=["Linear"], **form.scheme())
    theirs = schemes.preset_name_to_scheme(expected, ["Linear"])
    for part in ("weights", "input_activations"):
        left, right = getattr(ours, part).model_dump(), getattr(theirs, part).model_dump()
        assert {**left, "observer": None} == {**right, "observer": None}


@pytest.mark.parametrize("number", ["float", "int"])
@pytest.mark.parametrize("scales", ["tensor", "channel", "block"])
def test_tensors_are_as_described(number: Any, scales: Any) -> None:
    tensors = EightBitFormat(number, scales, "static" if scales != "block" else "none").tensors("BF16", 200, 300)
    tile = tile_of(scales, (200, 300))
    made = amax_scales(weight(200, 300), tile, FORMATS[number], torch.bfloat16)
    expected = (1,) if scales == "tensor" else tuple(made.shape)
    assert (tensors["weight_scale"].dtype, tensors["weight_scale"].shape) == ("BF16", expected)
    assert (tensors["weight"].dtype, tensors["weight"].shape) == ("F8_E4M3" if number == "float" else "I8", (200, 300))
    assert ("input_scale" in tensors) == (scales != "block")


def test_labels() -> None:
    assert (
        EightBitFormat("float", "channel", "dynamic").label == "8-bit floats, a scale per channel, dynamic activations"
    )
    assert EightBitFormat("int", "tensor", "none").label == "8-bit integers, a scale per tensor, float activations"
