"""Stages `nf4` and `int8` on tiny models: what bitsandbytes itself would have stored, what opens
it, and what is refused.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from optkit_evals.footprint import Footprint
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from optkit.errors import StageError
from optkit.measure import EvalContext
from optkit.model.checkpoint import Checkpoint
from optkit.session import loading, open_session
from optkit.session.step_bytes import weight_bytes
from optkit.stage import Context
from optkit.stages.int8 import Int8
from optkit.stages.nf4 import Nf4
from optkit.stages.quantizing.bitsandbytes import BitsAndBytesQuantizer
from tests.conftest import TinyModel
from tests.support.crossed import crossed
from tests.support.running import run_stage

pytest.importorskip("bitsandbytes")
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

TOKENS = torch.arange(60).view(2, 30)
IN_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
IN_FP4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
METHODS: dict[str, tuple[BitsAndBytesQuantizer, dict[str, Any]]] = {
    "nf4": (Nf4(), IN_NF4),
    "fp4": (Nf4(type="fp4", double_quantization=False), IN_FP4),
    "int8": (Int8(), {"load_in_8bit": True}),
    "int8 without outliers": (Int8(threshold=0), {"load_in_8bit": True, "llm_int8_threshold": 0.0}),
}


@pytest.mark.parametrize(
    ("method", "kind"), crossed([*METHODS], ["llama", "gpt2 bfloat16", "llama bfloat16", "gpt2", "opt float16"])
)
def test_it_stores_and_computes_what_bitsandbytes_does(
    tiny_model: TinyModel, tmp_path: Path, method: str, kind: str
) -> None:
    stage, options = METHODS[method]
    source, dtype = tiny_model(kind), getattr(torch, kind.partition(" ")[2] or "float32")
    compute = {"bnb_4bit_compute_dtype": dtype} if "load_in_4bit" in options else {}
    direct = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype, quantization_config=BitsAndBytesConfig(**options, **compute)
    )
    direct.save_pretrained(tmp_path / "direct")
    run_stage(stage, source, tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / place / "model.safetensors") for place in ("ours", "direct"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape)
        assert torch.equal(tensor, theirs[name]), name
    described, wanted = (
        BitsAndBytesConfig.from_dict(
            json.loads((tmp_path / place / "config.json").read_text())["quantization_config"]
        ).to_dict()
        for place in ("ours", "direct")
    )
    assert described | {"llm_int8_skip_modules": None} == wanted
    session = open_session(tmp_path / "ours")
    assert session.notes == ("bitsandbytes: opened by transformers, with the kernels that it has for it",)
    found = session.logits(TOKENS)
    with torch.no_grad():
        assert torch.equal(found, direct(TOKENS).logits.float())
    assert not torch.allclose(found, open_session(source).logits(TOKENS), atol=1e-2)


@pytest.mark.parametrize("method", METHODS)
def test_it_leaves_what_it_predicts(tiny_model: TinyModel, tmp_path: Path, method: str) -> None:
    stage = METHODS[method][0]
    source = Checkpoint(tiny_model("llama"))
    report = run_stage(stage, source.directory, tmp_path / "packed")
    cost, shape = stage.predict(source.shape, "cpu")
    written = Checkpoint(tmp_path / "packed")
    differing = {name for name, info in written.tensors.items() if shape.tensors[name] != info}
    assert shape.tensors.keys() == written.tensors.keys()
    assert shape.config == written.config
    if method == "nf4":  # the mean of the scales is written in decimal digits, which only the weights tell
        assert all(name.endswith("quant_state.bitsandbytes__nf4") for name in differing)
        assert cost.disk_bytes == pytest.approx(written.shape.size_bytes, abs=3 * 21)
    else:
        assert not differing
        assert cost.disk_bytes == written.shape.size_bytes
    assert cost.ram_bytes > 0
    assert stage.predict(source.shape, "cuda")[0].gpu_bytes > 0
    assert report.changed == 21
    assert report.skipped == {"lm_head": "outside the decoder blocks"}
    chosen = [info for name, info in written.tensors.items() if re.search(r"_proj\.", name)]
    bits = (
        8
        * sum(info.size_bytes for info in chosen)
        / sum(source.tensors[f"{name}.weight"].elements for name in _layers(written))
    )
    assert report.details["quantized_bits_per_weight"] == round(bits, 4)
    measured = {metric.name: metric.value for metric in Footprint().run(open_session(written.directory), EvalContext())}
    assert round(measured["bits_per_quantized_weight"], 4) == report.details["quantized_bits_per_weight"]
    assert round(measured["bits_per_weight"], 4) == report.details["bits_per_weight"]
    assert report.notes == (
        "transformers needs bitsandbytes to open it; vLLM, since version 0.28, its plug-in: "
        "pip install vllm-bnb-plugin",
    )


def _layers(checkpoint: Checkpoint) -> list[str]:
    return [name.removesuffix(".weight") for name in checkpoint.tensors if name.endswith("_proj.weight")]


@pytest.mark.parametrize(
    ("stage", "label"),
    [
        (Nf4(), "nf4, blocks of 64, scales in 8 bits"),
        (Nf4(type="fp4", double_quantization=False), "fp4, blocks of 64"),
        (Int8(), "8-bit integers, outliers above 6.0 in float16"),
        (Int8(threshold=0), "8-bit integers, no outliers"),
    ],
)
def test_the_report_says_the_form(
    tiny_model: TinyModel, tmp_path: Path, stage: BitsAndBytesQuantizer, label: str
) -> None:
    assert run_stage(stage, tiny_model("llama"), tmp_path / "packed").details["formats"] == {label: 21}


def test_the_compute_dtype_is_the_models_unless_it_is_said(tiny_model: TinyModel, tmp_path: Path) -> None:
    run_stage(Nf4(), tiny_model("llama float16"), tmp_path / "as stored")
    run_stage(Nf4(compute_dtype="bfloat16"), tiny_model("llama float16"), tmp_path / "said")
    found = [
        Checkpoint(tmp_path / place).config["quantization_config"]["bnb_4bit_compute_dtype"]
        for place in ("as stored", "said")
    ]
    assert found == ["float16", "bfloat16"]


def test_layers_that_the_kernel_of_this_cpu_cannot_take_are_computed_without_it(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitsandbytes.nn import modules

    run_stage(Nf4(), tiny_model("llama"), tmp_path / "packed")
    tokens = torch.arange(1, 9)[None]
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: False)
    expected = open_session(tmp_path / "packed").logits(tokens)
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: True)
    monkeypatch.setattr(loading, "BITSANDBYTES_TILE", (48, 48))
    session = open_session(tmp_path / "packed")
    assert torch.equal(session.logits(tokens), expected)
    (said,) = (note for note in session.notes if "tiles" in note)
    assert said.startswith("bitsandbytes: model.layers.0.mlp.down_proj, ")
    assert said.endswith(
        ", ... are no tiles of 48 x 48 weights, and are computed without its kernel for CPUs with AVX512-BF16; "
        "plain transformers fails there"
    )


def test_layers_that_are_left_out_stay_as_they_are_in_transformers_too(tiny_model: TinyModel, tmp_path: Path) -> None:
    from bitsandbytes.nn import Linear4bit

    run_stage(Nf4(exclude=("*.1.mlp.*", "*.0.self_attn.q_proj")), tiny_model("llama"), tmp_path / "packed")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    kept = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not isinstance(module, Linear4bit)
    }
    assert kept == {
        "lm_head",
        "model.layers.0.self_attn.q_proj",
        *(f"model.layers.1.mlp.{each}_proj" for each in ("gate", "up", "down")),
    }


def test_a_router_does_not_keep_layers_whose_names_begin_like_its_own(tiny_model: TinyModel, tmp_path: Path) -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    source = tiny_model("qwen2_moe")
    report = run_stage(Nf4(exclude=("*.experts.*", "*.k_proj")), source, tmp_path / "packed")
    patterns = Checkpoint(tmp_path / "packed").config["quantization_config"]["llm_int8_skip_modules"]
    quantized = {
        name.partition(".weight.")[0] for name in Checkpoint(tmp_path / "packed").tensors if ".weight.absmax" in name
    }
    assert all(should_convert_module(name, patterns) for name in quantized)
    assert not any(should_convert_module(name, patterns) for name in report.skipped)
    assert report.skipped["model.layers.1.mlp.shared_expert_gate"] == "router"
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(open_session(tmp_path / "packed").logits(TOKENS), expected(TOKENS).logits)


def test_a_name_that_begins_another_becomes_a_pattern() -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    from optkit.packed_tensors.bitsandbytes import EightBitRows

    form = EightBitRows(6.0)
    patterns = form.model_config({"model.layers.0.mlp.gate_proj": form}, ["lm_head", "model.layers.0.mlp.gate"])[
        "llm_int8_skip_modules"
    ]
    assert patterns == ["lm_head", r"(.*\.)?model\.layers\.0\.mlp\.gate$"]
    assert should_convert_module("model.layers.0.mlp.gate_proj", patterns)
    assert not should_convert_module("model.layers.0.mlp.gate", patterns)


@pytest.mark.parametrize("stage", [Nf4(), Int8()])
def test_experts_are_refused_before_anything_runs(tiny_model: TinyModel, stage: BitsAndBytesQuantizer) -> None:
    kind = type(stage).__name__.lower()
    said = (
        f"{kind}: 24 layers belong to experts (model.layers.0.block_sparse_moe.experts.0.w1, ...). "
        "transformers holds the experts of a "
        f"block in one tensor, and bitsandbytes knows Linear layers only. Set {kind}.exclude to "
        "['*.experts.*'], or use the stage gptq."
    )
    source = tiny_model("mixtral")
    with pytest.raises(StageError, match=re.escape(said)):
        stage.run(source, source, Context())
    with pytest.raises(StageError, match=re.escape(said)):
        stage.predict(Checkpoint(source).shape, "cpu")


def test_weights_beyond_float16_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    tensors = load_file(tiny_model("llama") / "model.safetensors")
    layer = "model.layers.1.mlp.up_proj"
    tensors[f"{layer}.weight"][3, 4] = -70000.0
    large = tmp_path / "large"
    large.mkdir()
    save_file(tensors, large / "model.safetensors", metadata={"format": "pt"})
    (large / "config.json").write_bytes((tiny_model("llama") / "config.json").read_bytes())
    said = (
        f"{layer}: weights of up to 70,000 do not fit float16. bitsandbytes casts to it before it rounds "
        "to 8 bits. Exclude the layer, or use the stage rtn with bits: 8."
    )
    with pytest.raises(StageError, match=re.escape(said)):
        run_stage(Int8(), large, tmp_path / "packed")
    assert run_stage(Int8(exclude=(layer,)), large, tmp_path / "without").changed == 20


@pytest.mark.parametrize(
    ("stage", "fields"), [(Int8, {"threshold": -1}), (Nf4, {"type": "nf3"}), (Nf4, {"compute_dtype": "int8"})]
)
def test_fields_have_their_ranges(stage: type[BitsAndBytesQuantizer], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields))):
        stage(**fields)


@pytest.mark.parametrize("double", [True, False])
def test_a_decode_step_reads_the_scales_too(tiny_model: TinyModel, tmp_path: Path, double: bool) -> None:
    run_stage(Nf4(double_quantization=double), tiny_model("llama"), tmp_path / "packed")
    tensors = Checkpoint(tmp_path / "packed").tensors
    read = sum(
        info.size_bytes for name, info in tensors.items() if "quant_map" not in name and "quant_state" not in name
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert weight_bytes(model, 1) == read + sum(buffer.nbytes for buffer in model.buffers())


def test_scales_that_a_kernel_for_cpus_has_undone_are_counted_as_they_are(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    run_stage(Nf4(double_quantization=True), tiny_model("llama"), tmp_path / "packed")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    before, layer = weight_bytes(model, 1), model.model.layers[0].mlp.up_proj
    state = layer.weight.quant_state
    undone = state.absmax.nbytes + state.state2.absmax.nbytes
    state.absmax, state.nested = torch.zeros(len(state.absmax), dtype=torch.bfloat16), False
    del state.state2  # as `bitsandbytes.functional._convert_weight_packed_for_cpu` leaves it
    assert weight_bytes(model, 1) == before - undone + state.absmax.nbytes


def test_bitsandbytes_warns_of_nothing(
    tiny_model: TinyModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_stage(Int8(), tiny_model("llama"), tmp_path / "packed")
    open_session(tmp_path / "packed").logits(TOKENS)
    assert "cast" not in capfd.readouterr().err


def test_the_package_is_named_where_it_is_missing(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.quantizers import quantizer_bnb_4bit

    from optkit.errors import MissingPackageError

    assert Nf4.requires == Int8.requires == ("bitsandbytes>=0.50",)
    run_stage(Nf4(), tiny_model("llama"), tmp_path / "packed")
    monkeypatch.setattr(quantizer_bnb_4bit, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(
        MissingPackageError, match="the package `bitsandbytes` is not installed. Run: pip install 'bitsandbytes'"
    ):
        open_session(tmp_path / "packed")
