"""Stage `mx` on tiny models: what is written, what opens it, and what it says when it cannot work."""

import json
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from optkit_evals.footprint import Footprint
from safetensors.torch import load_file, save_file

from optkit.errors import SourceError, StageError
from optkit.measure import EvalContext
from optkit.model.checkpoint import Checkpoint
from optkit.progress import asking
from optkit.session import open_session
from optkit.source.calibration import Calibration
from optkit.stage import Context, Report
from optkit.stages.mx import Mx
from optkit.stages.quantizing.learning_fields import LearningFields
from optkit.stages.quantizing.streaming import LayerQuantizer
from tests.conftest import TinyModel
from tests.support.changes import changed_copy
from tests.support.opened import transformers_logits
from tests.support.predictions import predicted
from tests.support.running import run_stage

TOKENS = torch.arange(60).view(2, 30)


def quantize(source: Path, target: Path, **fields: Any) -> Report:
    return run_stage(Mx(**fields), source, target)


@pytest.mark.parametrize("type", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(
    ("kind", "fields"), [("llama", {"exclude": ("*.0.mlp.*",)}), ("qwen2", {"scale_search": "minmax"}), ("gemma", {})]
)
def test_a_session_computes_what_transformers_does(
    tiny_model: TinyModel, tmp_path: Path, type: str, kind: str, fields: dict[str, Any]
) -> None:
    pytest.importorskip("compressed_tensors")

    quantize(tiny_model(f"{kind} bfloat16"), tmp_path / "packed", type=type, **fields)
    session = open_session(tmp_path / "packed")
    expected, original = (
        transformers_logits(place, TOKENS) for place in (tmp_path / "packed", tiny_model(f"{kind} bfloat16"))
    )
    assert torch.equal(session.logits(TOKENS), expected.float())
    assert not torch.allclose(expected, original, atol=1e-2)
    assert session.notes[0].startswith(f"{type}: ")
    assert session.notes[0].endswith("layers are dequantized at each call, because torch has no kernel for them")
    assert asking(session.notes) == [session.notes[0]]


def test_transformers_opens_experts_in_mxfp4(tiny_model: TinyModel, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")

    report = quantize(tiny_model("qwen2_moe bfloat16"), tmp_path / "packed", type="mxfp4")
    assert any(".experts." in name for name in Checkpoint(tmp_path / "packed").tensors)
    assert set(report.skipped.values()) == {"router", "outside the decoder blocks"}
    expected = transformers_logits(tmp_path / "packed", TOKENS, dtype=torch.bfloat16).float()
    assert torch.allclose(open_session(tmp_path / "packed").logits(TOKENS), expected, atol=0.05)


@pytest.mark.parametrize("type", ["nvfp4", "mxfp4"])
def test_it_leaves_what_it_predicts(tiny_model: TinyModel, tmp_path: Path, type: str) -> None:
    source = Checkpoint(tiny_model("llama bfloat16"))
    report = quantize(source.directory, tmp_path / "packed", type=type)
    cost = predicted(Mx.model_validate({"type": type}), source.directory, tmp_path / "packed")
    assert cost.ram_bytes > 0
    assert cost.gpu_bytes == 0
    on_gpu, _ = Mx.model_validate({"type": type}).predict(source.shape, "cuda")
    assert on_gpu.gpu_bytes > 0
    assert report.changed == 21
    assert report.details["quantized_bits_per_weight"] == pytest.approx(4.5 if type == "nvfp4" else 4.25, abs=0.01)
    found = {metric.name: metric.value for metric in Footprint().run(open_session(tmp_path / "packed"), EvalContext())}
    assert round(found["bits_per_quantized_weight"], 4) == report.details["quantized_bits_per_weight"]
    assert round(found["bits_per_weight"], 4) == report.details["bits_per_weight"]
    assert report.details["formats"] == {"nvfp4, blocks of 16" if type == "nvfp4" else "mxfp4, blocks of 32": 21}


@pytest.mark.parametrize("type", ["nvfp4", "mxfp4"])
def test_the_config_says_what_the_presets_of_compressed_tensors_say(
    tiny_model: TinyModel, tmp_path: Path, type: str
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    quantize(tiny_model("llama bfloat16"), tmp_path / "packed", type=type)
    described = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(described).config_groups["group_0"]
    preset = preset_name_to_scheme(f"{type.upper()}A16", ["Linear"]).weights
    assert scheme.weights.model_dump() == preset.model_dump()
    assert described["format"] == f"{type}-pack-quantized"
    assert described["ignore"] == ["lm_head"]


def test_the_layers_of_a_module_share_their_global_scale(tiny_model: TinyModel, tmp_path: Path) -> None:
    quantize(tiny_model("llama bfloat16"), tmp_path / "packed")
    tensors, weights = (
        load_file(place / "model.safetensors") for place in (tmp_path / "packed", tiny_model("llama bfloat16"))
    )
    for module in ("self_attn", "mlp"):
        prefix = f"model.layers.1.{module}."
        scales = [
            value.item()
            for name, value in tensors.items()
            if name.startswith(prefix) and name.endswith("weight_global_scale")
        ]
        largest = max(
            value.abs().max().item() for name, value in weights.items() if name.startswith(prefix) and value.dim() == 2
        )
        assert len(scales) > 2
        assert scales == pytest.approx([448 * 6 / largest] * len(scales))


def refusal(source: Path, **fields: Any) -> str:
    """Return what is said before anything is written, by `predict` and by `run` alike."""
    stage = Mx(**fields)
    with pytest.raises(StageError) as planned:
        stage.predict(Checkpoint(source).shape, "cpu")
    with pytest.raises(StageError) as run:
        stage.run(source, source, Context())
    assert str(planned.value) == str(run.value)
    return str(run.value)


def test_a_model_in_float32_is_refused(tiny_model: TinyModel) -> None:
    assert refusal(tiny_model("llama")) == (
        "mx: the model has weights in F32. compressed-tensors dequantizes 4-bit floats to bfloat16 alone, "
        "and transformers cannot mix it with another dtype. Put `- bf16` before it."
    )


def test_conv1d_layers_are_refused(tiny_model: TinyModel) -> None:
    assert refusal(tiny_model("gpt2 bfloat16")) == (
        "mx: 8 layers are Conv1D (transformer.h.0.attn.c_attn, ...). transformers opens compressed-tensors "
        "for Linear layers only. Use the stage nf4, or gptq with format: gptq."
    )


def test_experts_in_nvfp4_are_refused(tiny_model: TinyModel) -> None:
    assert refusal(tiny_model("mixtral bfloat16")) == (
        "mx.type: 24 layers belong to experts (model.layers.0.block_sparse_moe.experts.0.w1, ...). "
        "transformers opens experts in nvfp4 without their global scales, which is wrong. Set type: mxfp4."
    )


def test_some_experts_alone_are_refused(tiny_model: TinyModel) -> None:
    message = refusal(tiny_model("mixtral bfloat16"), type="mxfp4", exclude=("*.0.block_sparse_moe.experts.1.*",))
    assert message.startswith(
        "mx.exclude: model.layers.0.block_sparse_moe.experts.1.w1 is left out and other experts beside it are not."
    )


def test_blocks_that_do_not_fit_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    def narrowed(tensors: dict[str, torch.Tensor], width: int) -> dict[str, torch.Tensor]:
        for name, tensor in tensors.items():
            if ".mlp." in name:
                tensors[name] = (tensor[:, :width] if "down" in name else tensor[:width]).contiguous()
        return tensors

    narrow = changed_copy(tiny_model("llama bfloat16"), tmp_path, partial(narrowed, width=48), intermediate_size=48)
    assert refusal(narrow, type="mxfp4") == (
        "mx.type: 3 layers have columns (48) that are not a multiple of 32 (model.layers.0.mlp.down_proj, "
        "...). Blocks of mxfp4 are 32 inputs wide. Exclude them, or set type: nvfp4."
    )
    assert quantize(narrow, tmp_path / "packed").changed == 21
    (tmp_path / "again").mkdir()
    narrow = changed_copy(
        tiny_model("llama bfloat16"), tmp_path / "again", partial(narrowed, width=40), intermediate_size=40
    )
    assert refusal(narrow).endswith("Blocks of nvfp4 are 16 inputs wide. Exclude them.")


def test_scales_that_do_not_fit_are_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    quantize(tiny_model("llama bfloat16"), tmp_path / "packed")
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    layer = "model.layers.0.mlp.up_proj"
    held = tensors.pop(f"{layer}.weight_global_scale")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(SourceError, match=f"{layer}: there is no weight_global_scale."):
        open_session(tmp_path / "packed")
    wrong = {
        f"{layer}.weight_global_scale": held,
        f"{layer}.weight_scale": tensors[f"{layer}.weight_scale"].view(torch.uint8),
    }
    save_file({**tensors, **wrong}, file, metadata={"format": "pt"})
    said = r"up_proj: scales uint8 \[128, 4\] are not those of a weight \[128, 64\] in nvfp4. Make the artifact again."
    with pytest.raises(SourceError, match=said):
        open_session(tmp_path / "packed")


def test_running_out_of_memory_names_the_layer(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optkit.algorithms import microscaling
    from optkit.errors import ResourceError

    def full(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(microscaling, "quantize_nvfp4", full)
    with pytest.raises(
        ResourceError, match="model.layers.0.mlp.gate_proj: the main memory is full. Use a machine with more memory."
    ):
        quantize(tiny_model("llama bfloat16"), tmp_path / "packed")


def test_it_is_a_quantizer_without_overrides() -> None:
    assert issubclass(Mx, LayerQuantizer)
    calibrated = {"rounding", "activations", "calibration", "batch_size", "devices", *LearningFields.model_fields}
    assert set(Mx.model_fields) == {"include", "exclude", "towers", "type", "scale_search", *calibrated}
    assert not calibrated & set(Mx().model_dump())


def test_a_source_in_mxfp4_becomes_nvfp4_without_error(tiny_model: TinyModel, tmp_path: Path) -> None:
    from optkit.stages.dequantize import Dequantize

    quantize(tiny_model("llama bfloat16"), tmp_path / "mxfp4", type="mxfp4")
    run_stage(Dequantize(), tmp_path / "mxfp4", tmp_path / "floats")
    report = quantize(tmp_path / "floats", tmp_path / "nvfp4", scale_search="minmax")
    assert report.details["layers_without_error"] == report.changed == 21
    run_stage(Dequantize(), tmp_path / "nvfp4", tmp_path / "again")
    floats, again = (load_file(tmp_path / name / "model.safetensors") for name in ("floats", "again"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in floats.items())


@pytest.mark.parametrize("type", ["nvfp4", "mxfp4"])
def test_gptq_comes_nearer_on_the_same_grid(
    tiny_model: TinyModel, text: Calibration, tmp_path: Path, type: Literal["nvfp4", "mxfp4"]
) -> None:
    source = tiny_model("llama bfloat16")
    stage = Mx(type=type, rounding="gptq", calibration=text)
    report = run_stage(stage, source, tmp_path / "gptq")
    quantize(source, tmp_path / "nearest", type=type)
    cost = predicted(stage, source, tmp_path / "gptq")
    nearest, _ = Mx(type=type).predict(Checkpoint(source).shape, "cpu")
    assert cost.ram_bytes > nearest.ram_bytes
    assert report.calibrated_on == (text.identity(),)
    assert "rounded_to_nearest" not in report.details
    tokens = text.tokens(source, None)
    original, *others = (
        open_session(place).logits(tokens) for place in (source, tmp_path / "gptq", tmp_path / "nearest")
    )
    compensated, rounded = ((each - original).square().mean().item() for each in others)
    assert compensated < 0.8 * rounded


def test_experts_that_saw_few_tokens_are_rounded_to_nearest(
    tiny_model: TinyModel, text: Calibration, tmp_path: Path
) -> None:
    few = text.model_copy(update={"samples": 2})
    report = quantize(
        tiny_model("qwen2_moe bfloat16"), tmp_path / "packed", type="mxfp4", rounding="gptq", calibration=few
    )
    nearest = report.details["rounded_to_nearest"]
    assert nearest
    assert all(".experts." in name and tokens < 128 for name, tokens in nearest.items())
    assert f"{len(nearest)} layers are rounded to nearest: they saw fewer than the 128" in report.notes[-1]
    assert report.notes[-1].endswith("raise mx.calibration.samples, or set mx.calibration.experts: all")


def test_a_hessian_that_is_none_is_an_error_of_its_layer(
    tiny_model: TinyModel, text: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optkit.algorithms import microscaling

    def failed(*_: Any) -> None:
        raise ValueError("the Hessian is not positive definite, even with damping 10.0")

    monkeypatch.setattr(microscaling, "compensated", failed)
    with pytest.raises(StageError) as refused:
        quantize(tiny_model("llama bfloat16"), tmp_path / "packed", rounding="gptq", calibration=text)
    assert str(refused.value) == (
        "model.layers.0.self_attn.q_proj: the Hessian is not positive definite, even with damping 10.0. "
        "Set mx.rounding to nearest, or calibrate on more text."
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rounding": "gptq"}, "rounding: gptq needs a text: add calibration: {dataset: c4}, or take it out"),
        ({"activations": "dynamic"}, "activations: dynamic needs a text: add calibration: {dataset: c4}, or take"),
        ({"type": "mxfp4", "activations": "dynamic", "calibration": "c4"}, "the calibration text would not be read"),
        ({"calibration": "c4"}, "the calibration text would not be read: take it out, or set rounding: gptq"),
    ],
)
def test_rounding_and_text_belong_together(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mx.model_validate(fields)
