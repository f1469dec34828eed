"""Stage `dequantize`: each packed form beside transformers' own dequantization, or the format's definition."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from optkit.algorithms.grid import QuantizedWeight
from optkit.algorithms.packing import pack_awq
from optkit.errors import SourceError
from optkit.kernels import float_weights
from optkit.kernels.float_weights import READERS, WEIGHTS
from optkit.model.packed_floats import METHODS
from optkit.model.schemes import LAYOUTS
from optkit.stage import Context, Transform
from optkit.stages.dequantize import Dequantize
from optkit.stages.fp8 import Fp8
from optkit.stages.int8 import Int8
from optkit.stages.mx import Mx
from optkit.stages.nf4 import Nf4
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel
from tests.support.changes import change_json
from tests.support.dequantized import dequantized
from tests.support.packed_models import fp8, random_grid, rewritten, save_packed
from tests.support.running import run_stage

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def by_transformers(source: Path, **options: Any) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **options)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Whether every weight is one of those wanted, beside which scales may be left, and equal to it."""
    return all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


def test_all_that_is_known_without_torch_has_a_reader() -> None:
    assert set(METHODS) == READERS.keys()
    assert WEIGHTS.keys() == LAYOUTS.keys() - {"dense"}


@pytest.mark.parametrize("tile", [(32, 32), (16, 64), (16, 8)])
def test_fp8_blocks_are_what_transformers_makes_of_them(
    tiny_model: TinyModel, tmp_path: Path, tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import FineGrainedFP8Config

    monkeypatch.setattr(float_weights, "AT_ONCE", 64 * tile[0])  # a row of tiles at once

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(tile)}
    source = rewritten(tiny_model("llama"), tmp_path / "fp8", partial(fp8, tile=tile), **config)
    found = dequantized(source, tmp_path / "floats")
    asked = FineGrainedFP8Config(dequantize=True, weight_block_size=tile)
    assert same(found, by_transformers(source, quantization_config=asked))


@pytest.mark.gpu
def test_a_gpu_unpacks_the_bits_that_a_cpu_does(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    source = rewritten(tiny_model("llama"), tmp_path / "fp8", partial(fp8, tile=(32, 32)), **config)
    dequantized(source, tmp_path / "floats")  # reads them on both


def test_fp8_blocks_that_do_not_divide_a_weight_begin_at_its_corner(tiny_model: TinyModel, tmp_path: Path) -> None:
    """transformers refuses them; DeepSeek-V3's kv_a_proj_with_mqa has 576 outputs."""
    tile = (48, 40)
    source = rewritten(
        tiny_model("llama"), tmp_path / "fp8", partial(fp8, tile=tile), quant_method="fp8", weight_block_size=tile
    )
    name = "model.layers.1.mlp.down_proj.weight"
    stored = load_file(source / "model.safetensors")
    codes, scales = stored[name].float(), stored[f"{name}_scale_inv"]
    spread = scales.repeat_interleave(48, 0)[: len(codes)].repeat_interleave(40, 1)[:, : codes.shape[1]]
    assert torch.equal(dequantized(source, tmp_path / "floats")[name], (codes * spread).bfloat16())


@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_fp8_with_a_scale_for_a_tensor_or_an_output(tiny_model: TinyModel, tmp_path: Path, per: str) -> None:
    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        parts = fp8(name, weight, weight.shape if per == "tensor" else (1, weight.shape[1]))
        scales = parts[f"{name}_scale_inv"]
        beside = {name.replace("weight", "activation_scale"): torch.tensor(1.0)}
        return {**parts, f"{name}_scale_inv": scales.view(()) if per == "tensor" else scales, **beside}

    source = rewritten(
        tiny_model("llama"),
        tmp_path / "fp8",
        change,
        quant_method="fp8",
        weight_block_size=None,
        activation_scheme="static",
    )
    stored = load_file(source / "model.safetensors")
    found = dequantized(source, tmp_path / "floats", dtype="float32")
    coded = [name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(coded) == 21
    assert all(torch.equal(found[name], stored[name].float() * stored[f"{name}_scale_inv"]) for name in coded)
    assert not [name for name in found if "scale" in name]


def test_mxfp4_experts_are_what_transformers_makes_of_them(tiny_model: TinyModel, tmp_path: Path) -> None:
    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return {name: weight.bfloat16()}
        experts, inputs, outputs = weight.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(115, 125, blocks.shape[:3], dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    source = rewritten(tiny_model("gpt_oss"), tmp_path / "mxfp4", change, quant_method="mxfp4")
    found = dequantized(source, tmp_path / "floats")
    assert same(found, by_transformers(source))
    stored = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    blocks, scales = stored[f"{name}_blocks"].int(), stored[f"{name}_scales"].int()
    values = torch.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], -1).flatten(3) * 2.0 ** (scales - 127).unsqueeze(-1)
    assert torch.equal(found[name].float(), values.flatten(2).transpose(1, 2))


def nvfp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return random weights as ModelOpt stores NVFP4."""
    outputs, inputs = weight.shape
    scales = (torch.rand(outputs, inputs // 16) * 400).to(torch.float8_e4m3fn)
    beside = {f"{name}_scale": scales, f"{name}_scale_2": torch.rand(()) / 1000}
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    return {name: codes, **beside, name.replace("weight", "input_scale"): torch.tensor(1.0)}


def tensorwise_fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return random weights as ModelOpt stores FP8."""
    parts = fp8(name, weight, tuple(weight.shape))
    return {name: parts[name], f"{name}_scale": parts[f"{name}_scale_inv"].view(())}


@pytest.mark.parametrize("beside", [False, True], ids=["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_weights_of_modelopt_are_what_their_codes_say(
    tiny_model: TinyModel, tmp_path: Path, algorithm: str, beside: bool
) -> None:
    change = nvfp4 if algorithm == "NVFP4" else tensorwise_fp8
    told = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    source = rewritten(tiny_model("llama"), tmp_path / "packed", change, quant_method="modelopt", **told)
    if beside:
        change_json(source / "config.json", lambda config: config.pop("quantization_config"))
        said = {"producer": {"name": "modelopt"}, "quantization": told}
        (source / "hf_quant_config.json").write_text(json.dumps(said))
    found, stored = dequantized(source, tmp_path / "floats"), load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    codes, scales = stored[name], stored[f"{name}_scale"].float()
    if algorithm == "NVFP4":
        codes = torch.stack([E2M1[codes.int() & 15], E2M1[codes.int() >> 4]], -1).flatten(1)
        scales = (scales * stored[f"{name}_scale_2"]).repeat_interleave(16, 1)
    assert torch.equal(found[name], (codes.float() * scales).bfloat16())
    assert not [name for name in found if "scale" in name]
    assert not (tmp_path / "floats" / "hf_quant_config.json").exists()


def test_other_algorithms_of_modelopt_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    told = {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}
    source = rewritten(tiny_model("llama"), tmp_path / "packed", nvfp4, **told)
    with pytest.raises(SourceError, match=r"quant_method modelopt \(W4A8_AWQ\)\. .*of modelopt FP8, NVFP4\."):
        Dequantize().run(source, tmp_path, Context())


def test_fp8_experts_in_one_tensor(tiny_model: TinyModel, tmp_path: Path) -> None:
    """As Qwen3-VL's mixtures are published; transformers keeps them so for gpt-oss, too."""

    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        if weight.dim() != 3:
            return {name: weight.bfloat16()}
        each = [fp8(name, expert) for expert in weight]
        return {part: torch.stack([parts[part] for parts in each]) for part in each[0]}

    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    source = rewritten(tiny_model("gpt_oss"), tmp_path / "fp8", change, **config)
    found, stored = dequantized(source, tmp_path / "floats"), load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    spread = stored[f"{name}_scale_inv"].repeat_interleave(32, 1).repeat_interleave(32, 2)
    assert torch.equal(found[name], (stored[name].float() * spread).bfloat16())
    assert not [name for name in found if "scale" in name]
    stored[f"{name}_scale_inv"] = stored[f"{name}_scale_inv"][:, :1].contiguous()
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"scales \[4, 1, 2\] are not those of tiles of 32 x 32 of \[4, 128, 64\]"):
        Dequantize().run(source, tmp_path / "floats", Context())


@pytest.mark.parametrize(
    "stage",
    [
        Rtn(group_size=32),
        Rtn(bits=3, group_size=32, symmetric=False),
        Rtn(bits=8, group_size=None),
        Fp8(),
        Fp8(activations="none"),
        Mx(type="nvfp4"),
        Mx(type="mxfp4"),
        Nf4(),
        Nf4(double_quantization=False),
        Int8(threshold=0.0),
    ],
    ids=lambda stage: "-".join([stage.kind, *map(str, stage.model_dump(exclude_defaults=True).values())]),
)
def test_what_optkit_packs_is_what_transformers_makes_of_it(
    tiny_model: TinyModel, tmp_path: Path, stage: Transform
) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    run_stage(stage, tiny_model("llama bfloat16"), tmp_path / "packed")
    found = dequantized(tmp_path / "packed", tmp_path / "floats")
    if stage.kind in ("nf4", "int8"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", device_map="cpu").dequantize()
        wanted = {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}
    else:
        config = CompressedTensorsConfig(run_compressed=False)
        wanted = by_transformers(tmp_path / "packed", quantization_config=config)
    assert same(found, wanted)


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "gptq"},
        {"method": "gptq", "bits": 8, "activation_order": True},
        {"method": "gptq", "bits": 3, "symmetric": False},
        {"activation_order": True, "symmetric": False},
    ],
)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_codes_are_what_their_grid_says(
    tiny_model: TinyModel, tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    if kind == "gpt2" and fields.get("method") != "gptq":
        pytest.skip("compressed-tensors has no Conv1D")
    save_packed(tiny_model(kind), tmp_path / "packed", tmp_path / "plain", **fields)
    found = dequantized(tmp_path / "packed", tmp_path / "floats")
    wanted = load_file(tmp_path / "plain" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def group_of(**words: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, **words}
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 4, "type": "int"}}}


@pytest.mark.parametrize(
    ("form", "tile", "words"),
    [
        ("float-quantized", (32, 32), {"strategy": "block", "block_structure": [32, 32]}),
        ("naive-quantized", (1, 1 << 20), {"strategy": "channel"}),
        ("int-quantized", (1, 1 << 20), {"strategy": "channel", "type": "int"}),
        ("mxfp8-quantized", (1, 32), {"strategy": "group", "group_size": 32}),
    ],
)
def test_a_form_is_read_whatever_it_asks_of_activations(
    tiny_model: TinyModel, tmp_path: Path, form: str, tile: tuple[int, int], words: dict[str, Any]
) -> None:
    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        codes, scales = fp8(name, weight, tile).values()
        if form == "int-quantized":
            codes = torch.randint(-128, 128, codes.shape, dtype=torch.int8)
        if form == "mxfp8-quantized":
            scales = torch.randint(115, 125, scales.shape, dtype=torch.uint8)
        return {name: codes, f"{name}_scale": scales, name.replace("weight", "input_scale"): torch.ones(1)}

    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": group_of(**words)}
    source = rewritten(tiny_model("llama"), tmp_path / "packed", change, **config, kv_cache_scheme={"num_bits": 8})
    found, stored = dequantized(source, tmp_path / "floats"), load_file(source / "model.safetensors")
    name = "model.layers.2.mlp.gate_proj.weight"
    scales = stored[f"{name}_scale"]
    steps = 2.0 ** (scales.int() - 127) if scales.dtype == torch.uint8 else scales
    rows, columns = (min(each, size) for each, size in zip(tile, stored[name].shape, strict=True))
    spread = steps.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    assert torch.equal(found[name], (stored[name].float() * spread).bfloat16())
    assert found.keys() == load_file(tiny_model("llama") / "model.safetensors").keys()


def test_awq_is_what_its_grid_says(tiny_model: TinyModel, tmp_path: Path) -> None:
    plain: dict[str, Tensor] = {}

    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        codes, _ = random_grid((weight.shape[0], weight.shape[1]), 4, 32, symmetric=False)
        exact = QuantizedWeight(codes.codes, codes.scales.half().float(), codes.zeros, 4)
        spread = [each.float().repeat_interleave(32, 1) for each in (exact.zeros, exact.scales)]
        plain[name] = ((exact.codes.float() - spread[0]) * spread[1]).half()
        return {f"{name.removesuffix('weight')}{leaf}": part for leaf, part in pack_awq(exact).items()}

    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    source = rewritten(tiny_model("llama"), tmp_path / "awq", change, **config)
    found = dequantized(source, tmp_path / "floats", dtype="float16")
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"quant_method": "hqq"}, "no float weights can be made of quant_method hqq"),
        ({"quant_method": "awq", "version": "gemv"}, r"of quant_method awq \(gemv\)"),
        ({"bits": 4}, "of quant_method None"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": group_of()},
            r"of quant_method compressed-tensors \(marlin-24\)",
        ),
    ],
)
def test_forms_that_nobody_reads_are_refused(
    tiny_model: TinyModel, tmp_path: Path, config: dict[str, Any], what: str
) -> None:
    source = rewritten(tiny_model("llama"), tmp_path / "odd", lambda name, weight: {name: weight}, **config)
    with pytest.raises(SourceError, match=f"{what}. optkit reads compressed-tensors, gptq, .* Start from"):
        Dequantize().run(source, tmp_path, Context())


def test_weights_that_are_not_finite_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        parts = fp8(name, weight, (32, 32))
        parts[f"{name}_scale_inv"] *= 1e6
        return parts

    source = rewritten(tiny_model("llama"), tmp_path / "fp8", change, quant_method="fp8", weight_block_size=[32, 32])
    with pytest.raises(SourceError, match="stand for NaN or infinite ones. They were damaged, or do not fit float16"):
        Dequantize(dtype="float16").run(source, tmp_path, Context())


def test_scales_of_another_weight_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    change = partial(fp8, tile=(32, 32))
    source = rewritten(tiny_model("llama"), tmp_path / "fp8", change, quant_method="fp8", weight_block_size=[16, 16])
    with pytest.raises(SourceError, match=r"scales \[2, 4\] are not those of tiles of 16 x 16 of a weight \[64, 128\]"):
        Dequantize().run(source, tmp_path, Context())
