"""Our own CUDA kernels: their layout and their refusals anywhere, their numbers on a GPU against
float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from optkit.algorithms.packing import pack
from optkit.errors import OptkitError, RecipeError, StageError
from optkit.kernels.cuda.decoding import MOST_SEQUENCES, GraphDecoder, ModelSteps
from optkit.kernels.cuda.families import why_not_family
from optkit.kernels.cuda.matrix import Matrix, can_stack, dequantized, multiply, stacked, tiled, why_not_tiled
from optkit.kernels.cuda.nvrtc import compile_source
from optkit.kernels.cuda.schedule import default_schedule
from optkit.kernels.cuda.tiled_linear import TiledLinear
from optkit.kernels.packed_linear import PackedWeight
from optkit.model.shape import ModelShape
from optkit.plan import make_plan
from optkit.recipe.recipe import load_recipe
from optkit.session import open_session
from optkit.settings.compile import Compile
from optkit.settings.cuda_graphs import CudaGraphs
from optkit.settings.kv_cache import KvCache
from optkit.settings.precision import Precision
from optkit.settings.speculative import Speculative
from optkit.stage import Context, Setting, exclusion
from optkit.stages.rtn import Rtn
from optkit.store.store import Store
from tests.conftest import CONFIGS, SIZES, save_tiny_model
from tests.support.packed_models import random_grid

LLAMA = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


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


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model_type": "gpt2"}, "gpt2 is not of the families that it is known for (llama, mistral, qwen2, qwen3)"),
        ({"head_dim": 72}, "72 channels a head are no multiple of 16 up to 256"),
        (
            {"num_key_value_heads": 1},
            "32 queries of 128 channels share a head of keys (at most 16, and 2,048 channels)",
        ),
        (
            {"num_key_value_heads": 2, "head_dim": 256},
            "16 queries of 256 channels share a head of keys (at most 16, and 2,048 channels)",
        ),
        ({"hidden_act": "gelu"}, "the MLP's activation is gelu, not silu"),
        ({"sliding_window": 4096}, "its attention has a sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "its attention has a sliding window"),
        (
            {"rope_parameters": {"rope_type": "dynamic"}},
            "its rotary embeddings (dynamic) change with the length of the text",
        ),
    ],
)
def test_models_with_another_step_are_refused_before_anything_runs(changed: dict[str, Any], reason: str) -> None:
    shape = ModelShape({**LLAMA, **changed}, {})
    CudaGraphs().check(shape, "cpu")
    with pytest.raises(StageError, match="the decode step of this model cannot be one graph") as error:
        CudaGraphs().check(shape, "cuda:1")
    assert reason in str(error.value)
    assert "Take cuda_graphs out of the recipe, or use compile" in str(error.value)


def test_models_of_the_family_are_taken() -> None:
    assert why_not_family(LLAMA) is None
    assert why_not_family({**LLAMA, "sliding_window": 4096, "use_sliding_window": False}) is None
    CudaGraphs().check(ModelShape({**LLAMA, "rope_scaling": {"rope_type": "llama3"}}, {}), "cuda")


OTHERS: list[Setting] = [
    Compile(),
    Speculative(prompt_lookup=3),
    KvCache(dtype="int8"),
    Precision(mode="autocast"),
    Precision(mode="tf32"),
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_one_thing_decides_how_a_token_is_decoded_whatever_the_order(
    other: Setting, tiny_model: Callable[[str], Path]
) -> None:
    for order in ([CudaGraphs(), other], [other, CudaGraphs()]):
        with pytest.raises(StageError, match="exclude each other") as error:
            open_session(tiny_model("llama"), order)
        assert "cuda_graphs" in str(error.value)
        assert str(error.value).endswith("Take one of the two out.")


def test_settings_that_exclude_each_other_are_refused_at_their_line(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    stages: list[Any] = [{"speculative": {"prompt_lookup": 3}}, "cuda_graphs"]
    for order in (stages, stages[::-1]):
        with pytest.raises(
            RecipeError, match=r"and (speculative|cuda_graphs) \(.*\) exclude each other\. Each of them decides how"
        ) as error:
            load_recipe({"model": str(tiny_model("llama")), "stages": order})
        assert "Take one of the two out." in str(error.value)
    recipe = load_recipe(
        {"model": str(tiny_model("llama")), "stages": [{"compile": {"mode": "default"}}, stages[0]]}
    ).pinned(None)
    make_plan(recipe, Store(tmp_path), "cpu")
    with pytest.raises(StageError, match="speculative and compile exclude each other"):
        make_plan(recipe, Store(tmp_path), "cuda")


def test_a_cache_of_codes_in_the_checkpoint_is_refused() -> None:
    session: Any = SimpleNamespace(codes_cache=True, device="cuda")
    with pytest.raises(
        StageError, match="the checkpoint has scales for a KV cache of codes, and cuda_graphs keeps floats"
    ):
        CudaGraphs().on_open(session)


def test_the_graph_stays_with_what_is_only_another_dtype() -> None:
    for other in (Precision(mode="bf16"), Compile(devices=("cpu",))):
        assert exclusion([CudaGraphs(), other], "cuda") is None


def test_batches_that_the_graph_does_not_take_are_noted() -> None:
    decoder = GraphDecoder.__new__(GraphDecoder)
    decoder.model, decoder._by_model = SimpleNamespace(config=LlamaConfig()), set()
    assert decoder.notes == ()
    for batch in (512, 257, 512):
        with decoder.steps(batch, 10) as steps:
            assert isinstance(steps, ModelSteps)
    assert decoder.notes == (
        "cuda_graphs: off for batches of 257, 512, which the model decodes by its own step: the "
        "graph takes up to 256 sequences",
    )


def test_it_is_off_on_the_cpu(tiny_model: Callable[[str], Path]) -> None:
    assert CudaGraphs().describe("cpu") == "cuda_graphs: off on cpu"
    assert CudaGraphs().describe("cuda") == "cuda_graphs: on"
    plain, graphs = open_session(tiny_model("llama")), open_session(tiny_model("llama"), [CudaGraphs()])
    tokens = torch.arange(12).reshape(2, 6)
    assert graphs.generate(tokens, 4).equal(plain.generate(tokens, 4))  # type: ignore[union-attr]


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
        for tokens in (1, 3, 8, 9, 17, 32):
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
    usual = default_schedule(matrix.form, 5, False)
    for warps in (4, 8, 16):
        for depth in (1, 2, 3, 9):
            for row_tiles in (1, 2):
                for blocks in (1, 4):
                    y = torch.full((5, 208), torch.nan, dtype=torch.bfloat16, device="cuda")
                    multiply(
                        matrix,
                        x,
                        y,
                        schedule=replace(usual, warps=warps, depth=depth, row_tiles=row_tiles, blocks=blocks),
                    )
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


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", FAMILY)
def test_the_graph_says_what_the_model_says(
    kind: str, mode: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, kind, FAMILY[kind])
    directory = save_tiny_model(kind, tmp_path / "model")
    if packed:
        quantized = tmp_path / "packed"
        quantized.mkdir()
        Rtn(group_size=32, symmetric=False).run(directory, quantized, Context())
        directory = quantized
    graph = open_session(directory, [Precision(mode=mode), CudaGraphs()], device="cuda")  # type: ignore[arg-type]
    own = open_session(directory, [Precision(mode=mode)], device="cuda")  # type: ignore[arg-type]
    exact = open_session(directory, device="cuda", dtype="float32")
    for batch, prompt in ((1, 5), (3, 140), (12, 17), (45, 9), (130, 3), (1, 130)):
        tokens = torch.randint(0, 90, (batch, prompt))
        written = graph.generate(tokens, 30)  # type: ignore[union-attr]
        decoder = graph._decoder  # type: ignore[union-attr]
        logits = decoder._idle.logits  # type: ignore[union-attr]
        reference = exact.logits(written[:, :-1])[:, -1]  # type: ignore[union-attr]
        usual = own.logits(written[:, :-1])[:, -1]  # type: ignore[union-attr]
        assert written.shape == (batch, prompt + 30)
        assert difference(logits, reference.double()) < 2 * difference(usual, reference.double()) + 1e-3
        assert written[:, -1].equal(logits.argmax(-1))


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
def test_a_model_of_float32_is_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(StageError, match="its kernels compute in bfloat16 and float16, not float32"):
        open_session(tiny_model("llama"), [CudaGraphs()], device="cuda")
