"""Our own CUDA kernels: their layout and their refusals anywhere, their numbers on a GPU against
float64.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optkit.algorithms.packing import pack
from optkit.errors import OptkitError
from optkit.kernels.cuda.decoding import MOST_SEQUENCES
from optkit.kernels.cuda.matrix import Matrix, can_stack, dequantized, multiply, stacked, tiled, why_not_tiled
from optkit.kernels.cuda.nvrtc import compile_source
from optkit.kernels.cuda.schedule import Schedule
from optkit.kernels.cuda.tiled_linear import TiledLinear
from optkit.kernels.packed_linear import PackedWeight
from optkit.session import open_session
from optkit.settings.cuda_graphs import CudaGraphs
from optkit.settings.precision import Precision
from optkit.stage import Transform
from optkit.stages.fp8 import Fp8
from optkit.stages.rtn import Rtn
from optkit.stages.smoothquant import SmoothQuant
from tests.kernels.test_cuda_families import KNOWN
from tests.support.packed_models import random_grid
from tests.support.running import run_stage
from tests.support.tiny_models import CONFIGS, SIZES, save_tiny_model


def example(
    outputs: int, inputs: int, group_size: int, symmetric: bool, device: str = "cpu"
) -> tuple[PackedWeight, Tensor]:
    """A packed weight and its codes, uint8 [outputs, inputs]."""
    torch.manual_seed(outputs + inputs)
    grid, _ = random_grid((outputs, inputs), 4, group_size, symmetric, None)
    zeros = None if symmetric else grid.zeros.to(device)
    return PackedWeight(
        pack(grid.codes, 4, 1).to(device), grid.scales.to(device), zeros, None, 4, inputs
    ), grid.codes.to(device)


def dense(weight: PackedWeight, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in float64, with the scales that a dtype can hold."""
    size = weight.inputs // weight.groups
    zeros = 8.0 if weight.zeros is None else weight.zeros.double().repeat_interleave(size, 1)
    return (codes.double() - zeros) * weight.scales.to(dtype).double().repeat_interleave(size, 1)


def difference(ours: Tensor, reference: Tensor) -> float:
    assert torch.isfinite(ours).all()
    return float((ours.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize(
    ("outputs", "inputs", "group_size"), [(40, 576, 64), (16, 128, 32), (33, 256, 128), (16, 136, 136)]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_each_code_lies_where_its_lane_reads_it(outputs: int, inputs: int, group_size: int, symmetric: bool) -> None:
    weight, codes = example(outputs, inputs, group_size, symmetric)
    matrix = tiled(weight, torch.bfloat16)
    assert matrix.scales is not None
    assert (matrix.offsets is None) == symmetric
    found = torch.full_like(codes, 255)
    subgroups = matrix.scales.shape[2]
    for row in range(outputs):
        tile, half, g = row // 16, row // 8 % 2, row % 8
        for start in range(0, inputs, 8):
            chunk, j, t = start // 128, start // 32 % 4, start // 8 % 4
            word = int(matrix.weight[tile, chunk, half, 4 * g + t, j])
            found[row, start : start + 8] = torch.tensor([word >> 4 * i & 15 for i in range(8)], dtype=torch.uint8)
            place = (tile, chunk, j * subgroups // 4, g, half)
            assert matrix.scales[place] == weight.scales[row, start // group_size].bfloat16()
            if matrix.offsets is not None and weight.zeros is not None:
                assert float(matrix.offsets[place]) == 128 + int(weight.zeros[row, start // group_size])
    assert found.equal(codes)


@pytest.mark.parametrize("symmetric", [True, False])
def test_matrices_of_the_same_inputs_are_one_and_parts_of_it(symmetric: bool) -> None:
    single = [
        tiled(example(outputs, 128, 32, symmetric)[0], torch.float16, torch.randn(outputs)) for outputs in (32, 16, 24)
    ]
    assert can_stack(single)
    whole = stacked(single)
    assert whole.outputs == 72
    for part, original in zip(whole.parts([32, 16, 24]), single, strict=True):
        assert part.form == original.form
        assert part.weight.equal(original.weight)
        assert part.bias is not None
        assert original.bias is not None
        assert part.bias.equal(original.bias)
        assert part.weight.untyped_storage().data_ptr() == whole.weight.untyped_storage().data_ptr()
    assert not can_stack([*reversed(single)]), "24 outputs end in the middle of a tile"
    assert not can_stack([single[0], replace(single[1], group_size=64)])
    assert not can_stack([single[0], replace(single[1], bias=None)])


def test_float_matrices_are_stacked_too() -> None:
    parts = [Matrix(torch.randn(16, 8), 16, 8, torch.float16), Matrix(torch.randn(5, 8), 5, 8, torch.float16)]
    whole = stacked(parts)
    assert whole.form.bits == 16
    assert whole.parts([16, 5])[1].weight.equal(parts[1].weight)


def test_matrices_of_8_bits_are_stacked_with_their_scales() -> None:
    codes, static = [torch.randint(-128, 128, (rows, 32), dtype=torch.int8) for rows in (16, 32)], torch.ones(1)
    parts = [Matrix(each, len(each), 32, torch.bfloat16, torch.rand(len(each)), static) for each in codes]
    whole = stacked(parts)
    assert (whole.form.bits, whole.form.integer, whole.outputs) == (8, True, 48)
    for part, original in zip(whole.parts([16, 32]), parts, strict=True):
        assert part.form == original.form
        assert part.weight.equal(original.weight)
        assert part.scales is not None
        assert part.scales.equal(original.scales)  # type: ignore[arg-type]
    assert can_stack(parts)
    assert not can_stack([parts[0], replace(parts[1], offsets=torch.full((1,), 2.0))])


def test_what_a_matrix_of_4_bits_is_not_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = example(16, 128, 32, True)
    assert (
        why_not_tiled(weight, torch.bfloat16, "cpu") == "optkit's int4 kernel needs an "
        "NVIDIA GPU of compute capability 8.0"
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0" in str(why_not_tiled(weight, torch.bfloat16, "cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert why_not_tiled(weight, torch.bfloat16, "cuda") is None
    assert (
        why_not_tiled(weight, torch.float32, "cuda") == "optkit's int4 kernel computes in bfloat16 "
        "and float16, and the model is float32"
    )
    assert why_not_tiled(replace(weight, bits=8), torch.float16, "cuda") == "optkit's int4 kernel has no 8 bits"
    assert (
        why_not_tiled(replace(weight, inputs=100), torch.float16, "cuda") == "optkit's int4 kernel takes "
        "multiples of 8 inputs, not 100"
    )
    odd, _ = example(16, 192, 96, True)
    assert (
        why_not_tiled(odd, torch.float16, "cuda") == "optkit's int4 kernel has groups of 32, "
        "64 and multiples of 128 inputs, not 96"
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "inputs", "group_size"),
    [(64, 256, 32), (4096, 4096, 128), (72, 576, 64), (96, 14336, 128), (32, 136, 136)],
)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_those_of_float64(
    outputs: int, inputs: int, group_size: int, symmetric: bool, dtype: torch.dtype
) -> None:
    limit = 8e-3 if dtype == torch.bfloat16 else 1e-3
    weight, codes = example(outputs, inputs, group_size, symmetric, "cuda")
    exact = dense(weight, codes, dtype)
    matrix = tiled(weight, dtype)
    assert difference(dequantized(matrix), exact) < limit
    rounded = exact.to(dtype)
    for chosen, reference in ((matrix, exact), (Matrix(rounded, outputs, inputs, dtype), rounded.double())):
        for tokens in (1, 2, 3, 5, 8, 9, 16, 17, 32):
            x = torch.randn(tokens, inputs, device="cuda").to(dtype)
            norm = (torch.rand(inputs, device="cuda") + 0.5).to(dtype)
            normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * norm.double()
            before = torch.randn(tokens, outputs, device="cuda").to(dtype)
            added, wide = before.clone(), torch.full((tokens, outputs), torch.nan, device="cuda")
            multiply(chosen, x, added, add=True)
            multiply(chosen, x, wide, norm=norm, epsilon=1e-5)
            assert difference(added, before.double() + x.double() @ reference.T) < limit
            assert difference(wide, normed @ reference.T) < limit
            if outputs % 32 == 0:
                gated, full = (
                    torch.full((tokens, outputs // 2), torch.nan, dtype=dtype, device="cuda"),
                    normed @ reference.T,
                )
                multiply(chosen, x, gated, norm=norm, epsilon=1e-5, gated=True)
                expected = F.silu(full[:, : outputs // 2]) * full[:, outputs // 2 :]
                assert difference(gated, expected) < 2 * limit


@pytest.mark.gpu
def test_every_schedule_gives_the_same_product() -> None:
    weight, codes = example(208, 1152, 64, False, "cuda")
    matrix, x = tiled(weight, torch.bfloat16), torch.randn(5, 1152, device="cuda").bfloat16()
    expected = x.double() @ dense(weight, codes, torch.bfloat16).T
    ways = [(4, 1, 1, 4), (7, 2, 2, 1, 3), (16, 9, 1, 4), (8, 3, 2, 4, 3)]
    for way in ways:
        y = torch.full((5, 208), torch.nan, dtype=torch.bfloat16, device="cuda")
        multiply(matrix, x, y, schedule=Schedule(*way))
        assert difference(y, expected) < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 7, 32, 33, 200])
def test_a_layer_under_compile_is_the_layer(rows: int) -> None:
    weight, codes = example(48, 256, 128, False, "cuda")
    bias = torch.randn(48, device="cuda").half()
    layer = TiledLinear(tiled(weight, torch.float16, bias), None)
    hidden = torch.randn(2, rows, 256, device="cuda").half()
    ours = layer(hidden)
    assert ours.shape == (2, rows, 48)
    if rows:
        assert difference(ours, hidden.double() @ dense(weight, codes, torch.float16).T + bias.double()) < 1e-3
        assert torch.compile(layer, fullgraph=True)(hidden).equal(ours)


@pytest.mark.gpu
def test_what_cannot_be_compiled_says_why() -> None:
    with pytest.raises(OptkitError, match="NVRTC cannot compile it"):
        compile_source("this is no C++", {}, "sm_90", "nothing.cu")


FAMILY: dict[str, dict[str, object]] = {
    "llama": CONFIGS["llama"],
    "qwen2": CONFIGS["qwen2"],
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 32, "num_hidden_layers": 3},
    "mistral": {
        "model_type": "mistral",
        **SIZES,
        "sliding_window": None,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}


PACKED: dict[str, Transform] = {
    "int4": Rtn(group_size=32, symmetric=False),
    "symmetric int4": Rtn(group_size=32),
    "fp8": Fp8(),
    "w8a8": SmoothQuant(calibration={"dataset": "python-reference", "samples": 2, "sequence_length": 32}),
}


MIXTURES = {"qwen3_moe", "mixtral", "gpt_oss"}
"""Rounding may send a token to another expert. Packed experts have no zero points."""
OTHERS: dict[str, dict[str, object]] = {
    kind: {"model_type": kind, **SIZES, "head_dim": 16, "num_hidden_layers": 3, **changed}
    for kind, changed in KNOWN.items()
    if kind not in FAMILY
}
OPENED = [
    *product(FAMILY, ("bf16", "fp16"), ("float", "int4", "fp8", "w8a8")),
    *((kind, "bf16", weights) for kind in OTHERS for weights in ("float", "int4") if kind not in MIXTURES),
    *product(sorted(MIXTURES), ("bf16",), ("float", "symmetric int4")),
    ("qwen3_moe", "bf16", "fp8"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "mode", "weights"), OPENED)
def test_the_graph_says_what_the_model_says(
    kind: str, mode: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, kind, (FAMILY | OTHERS)[kind])
    directory = save_tiny_model(kind, tmp_path / "model")
    if stage := PACKED.get(weights):
        quantized = tmp_path / "packed"
        run_stage(stage, directory, quantized)
        directory = quantized
    graph = open_session(directory, [Precision(mode=mode), CudaGraphs()], device="cuda")  # type: ignore[arg-type]
    own = open_session(directory, [Precision(mode=mode)], device="cuda")  # type: ignore[arg-type]
    exact = open_session(directory, device="cuda", dtype="float32")  # rounds inputs of 8-bit layers too
    for batch, prompt in ((1, 5), (3, 140), (12, 17), (45, 9), (130, 3), (1, 130)):
        tokens = torch.randint(0, 90, (batch, prompt))
        written = graph.generate(tokens, 30)  # type: ignore[union-attr]
        decoder = graph._decoder  # type: ignore[union-attr]
        logits = decoder._idle.logits  # type: ignore[union-attr]
        if cap := getattr(decoder.model.config, "final_logit_softcapping", None):
            logits = cap * torch.tanh(logits / cap)
        reference = exact.logits(written[:, :-1])[:, -1]  # type: ignore[union-attr]
        usual = own.logits(written[:, :-1])[:, -1]  # type: ignore[union-attr]
        assert written.shape == (batch, prompt + 30)
        allowed = 2 * difference(usual, reference.double()) + (0.05 if kind in MIXTURES else 1e-3)
        assert difference(logits, reference.double()) < allowed
        assert written[:, -1].equal(logits.argmax(-1))
        first = own.logits(tokens)[:, -1].double()  # type: ignore[union-attr]
        short = first.amax(-1) - first.gather(1, written[:, prompt, None])[:, 0]
        likely = (short < 0.5 * first.std(-1)).double().mean()
        assert likely >= (0.9 if kind in MIXTURES else 1), "the prompt's token is about the likeliest"
    for _ in range(2):  # from the second time on a graph reads it
        assert graph.generate(tokens, 30).equal(written)  # type: ignore[union-attr]


@pytest.mark.gpu
def test_more_sequences_than_the_graph_takes_run_through_the_model(tiny_model: Callable[[str], Path]) -> None:
    settings = [Precision(mode="bf16"), CudaGraphs()]
    graph, own = (
        open_session(tiny_model("llama"), settings, device="cuda"),
        open_session(tiny_model("llama"), settings[:1], device="cuda"),
    )
    tokens = torch.randint(0, 90, (MOST_SEQUENCES + 1, 6))
    assert graph.generate(tokens, 5).equal(own.generate(tokens, 5))  # type: ignore[union-attr]


@pytest.mark.gpu
def test_a_model_of_float32_is_compiled(tiny_model: Callable[[str], Path]) -> None:
    session = open_session(tiny_model("llama"), [CudaGraphs()], device="cuda")
    assert any("its kernels compute in bfloat16 and float16, not float32" in note for note in session.notes)
