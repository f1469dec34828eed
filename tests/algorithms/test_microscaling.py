"""MXFP4 and NVFP4 as tensors: rounding against a search through all values, scales and bytes
against compressed-tensors.
"""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optkit.algorithms.microscaling import (
    E2M1,
    MicroscaledWeight,
    compensated,
    exact_nvfp4_scale,
    exponent_scales,
    nvfp4_global_scale,
    pack,
    quantize_mxfp4,
    quantize_nvfp4,
    round_to_e2m1,
    rounded_inputs,
    unpack,
)

VALUES = [*E2M1, *(-value for value in E2M1)]


def nearest(value: float) -> float:
    """Return the nearest value of E2M1 by trying all of them; of two equally near the one with the
    even code.
    """
    size = min(abs(value), 6.0)
    code = min(range(8), key=lambda code: (abs(E2M1[code] - size), code % 2))
    return math.copysign(E2M1[code], value)


def random_weight(outputs: int, inputs: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return weights whose blocks differ in size by powers of two, some of them outliers."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.02
    weight *= 2.0 ** torch.randint(-6, 4, (outputs, inputs // 32, 1), generator=generator).expand(-1, -1, 32).reshape(
        outputs, inputs
    )
    return weight.to(dtype)


@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=40))
def test_rounding_finds_the_nearest_value(values: list[float]) -> None:
    assert round_to_e2m1(torch.tensor(values)).tolist() == [nearest(value) for value in values]


def test_ties_go_to_the_even_code() -> None:
    middles = [(low + high) / 2 for low, high in pairwise(E2M1)]
    assert round_to_e2m1(torch.tensor(middles)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_every_exponent_is_exact() -> None:
    assert exponent_scales(torch.arange(255, dtype=torch.uint8)).tolist() == [
        2.0 ** (stored - 127) for stored in range(255)
    ]


def test_the_scale_of_mxfp4_is_that_of_the_specification_but_for_blocks_that_it_would_cut_by_more_than_an_eighth() -> (
    None
):
    peaks = torch.tensor([4.0, 5.9, 6.0, 6.99, 7.0, 7.99, 8.0, 1e-3, 0.0])
    weight = torch.zeros(len(peaks), 32).index_fill_(1, torch.tensor([7]), 1) * peaks[:, None]
    stored = quantize_mxfp4(weight).scales[:, 0].tolist()
    assert [value - 127 for value in stored] == [0, 0, 0, 0, 1, 1, 1, -12, 0]


def test_a_search_is_never_worse_and_pays_for_nvfp4() -> None:
    weight = random_weight(96, 256, 0).float()
    shared = nvfp4_global_scale([weight])

    def errors(quantized: MicroscaledWeight, block: int) -> Tensor:
        return (quantized.dequantize() - weight).square().view(96, -1, block).sum(-1)

    plain, searched = (errors(quantize_nvfp4(weight, shared, search), 16) for search in (False, True))
    assert bool((searched <= plain * (1 + 1e-6)).all())
    assert searched.sum() < 0.8 * plain.sum()
    plain, searched = (errors(quantize_mxfp4(weight, search), 32) for search in (False, True))
    assert bool((searched <= plain).all())
    assert searched.sum() < plain.sum()


@pytest.mark.parametrize("search", [False, True])
def test_a_search_finds_the_best_of_all_scales(search: bool) -> None:
    weight = random_weight(4, 32, 3).float()
    shared = nvfp4_global_scale([weight])
    found = (quantize_nvfp4(weight, shared, search).dequantize() - weight).square().view(4, 2, 16).sum(-1)
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float() / shared  # every positive one
    tried = torch.stack(
        [(round_to_e2m1(weight / scale) * scale - weight).square().view(4, 2, 16).sum(-1) for scale in scales]
    )
    assert bool((found <= tried.amin(0) * 1.0001).all()) == search


def test_zeros_stay_zeros() -> None:
    weight = torch.zeros(2, 64)
    for quantized in (quantize_mxfp4(weight, True), quantize_nvfp4(weight, nvfp4_global_scale([weight]), True)):
        assert torch.equal(quantized.dequantize(), weight)


def test_a_block_far_below_the_largest_weight_keeps_a_scale() -> None:
    weight = torch.full((1, 32), 1e-6)
    weight[0, 0] = 100.0
    quantized = quantize_nvfp4(weight, nvfp4_global_scale([weight]))
    assert quantized.scales.float().min() == 2.0**-9
    assert bool(quantized.dequantize().isfinite().all())


def test_weights_that_share_a_global_scale_take_the_largest() -> None:
    small, large = torch.full((2, 16), 0.5), torch.full((2, 16), -4.0)
    assert nvfp4_global_scale([small, large]).tolist() == [448 * 6 / 4]


def compressors() -> dict[str, tuple[Any, Any]]:
    """Return format -> compressed-tensors' own compressor and scheme."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    return {
        "mxfp4": (MXFP4PackedCompressor, preset_name_to_scheme("MXFP4A16", ["Linear"])),
        "nvfp4": (NVFP4PackedCompressor, preset_name_to_scheme("NVFP4A16", ["Linear"])),
    }


@settings(max_examples=40)
@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(0, 2**32),
    st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_bytes_are_those_of_compressed_tensors(
    outputs: int, blocks: int, seed: int, search: bool, dtype: torch.dtype
) -> None:
    weight = random_weight(outputs, blocks * 32, seed, dtype)
    weight[0, :3] = torch.tensor([0.0, -0.0, -1e-8])
    shared = nvfp4_global_scale([weight])
    for name, quantized in (
        ("mxfp4", quantize_mxfp4(weight, search)),
        ("nvfp4", quantize_nvfp4(weight, shared, search)),
    ):
        compressor, scheme = compressors()[name]
        scales = exponent_scales(quantized.scales).to(dtype) if name == "mxfp4" else quantized.scales.float()
        given_state = {"weight": weight.clone(), "weight_scale": scales}
        theirs = compressor.compress(
            given_state if name == "mxfp4" else {**given_state, "weight_global_scale": shared}, scheme
        )
        ours = pack(quantized)
        assert ours.keys() == theirs.keys()
        for leaf, tensor in ours.items():
            assert tensor.dtype == theirs[leaf].dtype
            assert torch.equal(tensor.view(torch.uint8), theirs[leaf].view(torch.uint8)), leaf
        again = unpack(ours)
        assert torch.equal(again.codes, quantized.codes)
        back = compressor.decompress({leaf: tensor.clone() for leaf, tensor in ours.items()}, scheme)["weight"]
        assert torch.equal(back, again.dequantize().bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_inputs_are_rounded_as_compressed_tensors_rounds_them(name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationStatus
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    inputs = random_weight(6, 64, 3, dtype).view(2, 3, 64).clone()
    inputs[0, 0], inputs[1, 1, :16], inputs[1, 2, 5] = 0, 1e-7, 300  # nothing, too little, beyond the global scale
    shared = nvfp4_global_scale([inputs[0]]) if name == "nvfp4" else None
    layer = torch.nn.Linear(64, 4)
    layer.quantization_status, layer.input_global_scale = QuantizationStatus.FROZEN, shared
    theirs = forward_quantize(layer, inputs, "input", preset_name_to_scheme(name.upper(), ["Linear"]).input_activations)
    ours = rounded_inputs(inputs, shared)
    assert ours.dtype == dtype
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_minmax_scales_are_those_that_compressed_tensors_computes(name: str) -> None:
    _, scheme = compressors()[name]
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight = random_weight(64, 256, 1).float()
    blocks = weight.view(64, -1, scheme.weights.group_size)
    shared = nvfp4_global_scale([weight]) if name == "nvfp4" else None
    theirs, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, shared)
    if shared is None:
        assert torch.equal(exponent_scales(quantize_mxfp4(weight).scales), theirs)
    else:
        assert torch.equal(shared, generate_gparam(weight.min(), weight.max()))
        assert torch.equal(quantize_nvfp4(weight, shared).scales.float(), theirs)


def test_two_codes_share_a_byte_the_even_input_below() -> None:
    weight = MicroscaledWeight(
        torch.arange(16, dtype=torch.uint8).repeat(2)[None], torch.full((1, 1), 128, dtype=torch.uint8)
    )
    assert pack(weight)["weight_packed"].tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2]
    assert weight.dequantize().tolist() == [[2 * value for value in VALUES * 2]]


@pytest.mark.parametrize("search", [True, False])
def test_weights_of_mxfp4_are_held_by_nvfp4_without_error(search: bool) -> None:
    weights = [quantize_mxfp4(random_weight(40, 96, seed), search).dequantize() for seed in (1, 2)]
    weights[0][3] = 0
    shared = exact_nvfp4_scale([weight.bfloat16() for weight in weights])
    assert shared is not None
    for weight in weights:
        packed = unpack(pack(quantize_nvfp4(weight, shared, search=True)))
        assert torch.equal(packed.dequantize(), weight)


def test_nvfp4_holds_no_more_powers_of_two_than_its_scales_have() -> None:
    weight = torch.zeros(2, 16)
    weight[0, :8], weight[1] = torch.tensor(E2M1) * 2.0**9, 6 * 2.0**-8
    shared = exact_nvfp4_scale([weight])
    assert shared is not None
    assert torch.equal(quantize_nvfp4(weight, shared, search=True).dequantize(), weight)
    assert exact_nvfp4_scale([weight * torch.tensor([[1.0], [0.5]])]) is None
    assert exact_nvfp4_scale([random_weight(2, 32, 0)]) is None
    assert exact_nvfp4_scale([torch.zeros(2, 16)]) is None


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_compensated_codes_are_nearer_under_the_hessian(form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1000, 40, generator=generator) @ torch.randn(40, 160, generator=generator)
    inputs += 0.3 * torch.randn(1000, 160, generator=generator)
    inputs *= torch.rand(160, generator=generator) + 0.1
    weight, hessian = torch.randn(48, 160, generator=generator), inputs.T @ inputs / 1000

    def rounded(importance: Tensor | None) -> MicroscaledWeight:
        if form == "mxfp4":
            return quantize_mxfp4(weight, True, importance)
        return quantize_nvfp4(weight, nvfp4_global_scale([weight]), True, importance)

    def error(found: MicroscaledWeight) -> float:
        off = found.dequantize() - weight
        return float(((off @ hessian) * off).sum())

    nearest, weighed = rounded(None), rounded(hessian.diagonal())
    better = compensated(weight, weighed, hessian)
    assert error(better) < 0.5 * min(error(nearest), error(weighed))
    weighed_error, plain_error = (
        float(((each.dequantize() - weight).square() * hessian.diagonal()).sum()) for each in (weighed, nearest)
    )
    assert weighed_error < plain_error
    assert torch.equal(unpack(pack(better)).dequantize(), better.dequantize())
