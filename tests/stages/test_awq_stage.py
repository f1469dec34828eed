"""Stages `awq` and `awq_scale` on tiny models: what scaling buys, what is written and opened, and
what they say when they cannot work.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from optkit.algorithms.packing import unpack_awq
from optkit.errors import RecipeError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.shape import TensorInfo
from optkit.recipe.recipe import load_recipe
from optkit.session import open_session
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.awq import Awq
from optkit.stages.awq_scale import AwqScale
from optkit.stages.cast import Cast
from optkit.stages.mx import Mx
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel, Warnings
from tests.support.changes import changing
from tests.support.crossed import crossed, few
from tests.support.running import run_stage


def logits(directory: Path) -> Tensor:
    tokens = torch.randint(0, 512, (4, 48), generator=torch.Generator().manual_seed(7))
    return open_session(directory).logits(tokens)


def distance(directory: Path, source: Path) -> float:
    return float((logits(directory) - logits(source)).norm() / logits(source).norm())


def uneven(source: Path, target: Path) -> Path:
    """Copy a tiny model and make its norms and values pass channels on with very different sizes,
    as trained ones do.
    """

    shutil.copytree(source, target)
    with changing(target) as tensors:
        generator = torch.Generator().manual_seed(11)
        for name, tensor in tensors.items():
            if tensor.dim() == 1 and "norm" in name and ".layers." in name:
                tensors[name] = torch.exp(torch.randn(tensor.shape, generator=generator)) - int("gemma" in str(source))
            elif name.endswith("v_proj.weight"):
                tensors[name] = tensor * torch.exp(torch.randn(len(tensor), 1, generator=generator))
    return target


@pytest.mark.parametrize("kind", few("llama", "gemma", "mixtral", slow=("qwen2", "qwen2_moe")))
def test_outputs_stay_nearer_than_with_the_same_rounding_alone(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, kind: str
) -> None:
    source = uneven(tiny_model(kind), tmp_path / "source")
    report = run_stage(Awq(symmetric=True, group_size=32, calibration=text, batch_size=5), source, tmp_path / "awq")
    run_stage(Rtn(group_size=32, scale_search="mse"), source, tmp_path / "rtn")
    assert distance(tmp_path / "awq", source) < 0.9 * distance(tmp_path / "rtn", source)
    assert report.details["unscaled"] == {}
    assert all(gain["scaled"] <= gain["plain"] for gain in report.details["gains"].values())
    assert report.changed == len(report.details["losses"])


def test_format_awq_is_written_as_predicted_and_opened(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration
) -> None:
    source, stage = tiny_model("llama"), Awq(format="awq", group_size=32, grid_points=3, calibration=text)
    run_stage(stage, source, tmp_path / "awq")
    run_stage(Awq(group_size=32, grid_points=3, calibration=text), source, tmp_path / "packed")
    left, other = Checkpoint(tmp_path / "awq"), Checkpoint(tmp_path / "packed")
    predicted = stage.predict(Checkpoint(source).shape, "cpu")[1]
    assert left.tensors == dict(predicted.tensors)
    assert left.config == predicted.config
    assert left.config["quantization_config"] == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }
    name = "model.layers.1.mlp.down_proj"
    weight = unpack_awq({leaf: left.read(f"{name}.{leaf}") for leaf in ("qweight", "qzeros", "scales")})
    expected = replace(weight, scales=weight.scales.float()).dequantize()
    session = open_session(tmp_path / "awq")
    identity = torch.eye(expected.shape[1])
    torch.testing.assert_close(session.model.get_submodule(name)(identity).T, expected, atol=1e-6, rtol=0)
    assert (
        left.tensors["model.layers.1.input_layernorm.weight"] == other.tensors["model.layers.1.input_layernorm.weight"]
    )
    assert distance(tmp_path / "awq", source) == pytest.approx(distance(tmp_path / "packed", source), rel=0.3)


def test_what_makes_an_input_and_the_routers_that_read_it_are_written_too(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration
) -> None:
    source = tiny_model("mixtral")
    stage = Awq(symmetric=True, group_size=32, grid_points=3, calibration=text)
    run_stage(stage, source, tmp_path / "awq")
    before, after = Checkpoint(source), Checkpoint(tmp_path / "awq")
    assert after.tensors == dict(stage.predict(before.shape, "cpu")[1].tensors)
    kept = [name for name in before.tensors if name in after.tensors and ".layers." in name]
    assert len(kept) == 2 * 3
    assert all(not torch.equal(before.read(name), after.read(name)) for name in kept)
    assert all(torch.equal(before.read(name), after.read(name)) for name in before.tensors if ".layers." not in name)


def test_layers_that_are_left_out_are_compensated(tiny_model: TinyModel, tmp_path: Path, text: Calibration) -> None:
    source = uneven(tiny_model("qwen2"), tmp_path / "source")
    run_stage(
        Awq(group_size=32, grid_points=3, bits=8, exclude=("*.v_proj", "*.gate_proj"), calibration=text),
        source,
        tmp_path / "awq",
    )
    after = Checkpoint(tmp_path / "awq")
    for leaf in ("self_attn.v_proj.weight", "self_attn.v_proj.bias", "mlp.gate_proj.weight"):
        assert not torch.equal(Checkpoint(source).read(f"model.layers.0.{leaf}"), after.read(f"model.layers.0.{leaf}"))
    assert distance(tmp_path / "awq", source) < 0.05


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "gptj", "opt", "mixtral"])
def test_scales_alone_leave_the_model_as_it_is(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, kind: str
) -> None:
    source, stage = tiny_model(kind), AwqScale(group_size=32, grid_points=3, calibration=text)
    report = run_stage(stage, source, tmp_path / "scaled")
    before, after = Checkpoint(source), Checkpoint(tmp_path / "scaled")
    assert after.tensors == dict(stage.predict(before.shape, "cpu")[1].tensors) == before.tensors
    assert after.config == before.config
    assert distance(tmp_path / "scaled", source) < 1e-5
    assert report.changed == sum(not torch.equal(before.read(name), after.read(name)) for name in before.tensors)
    assert report.calibrated_on == (text.identity(),)
    assert {name.rpartition(".h.1.")[2] for name in report.skipped if ".h.1." in name} == {
        "gpt2": {"mlp.c_proj"},
        "gptj": {"mlp.fc_out"},
    }.get(kind, set())


@pytest.mark.parametrize(
    ("kind", "quantizer"),
    crossed(
        ["llama", "gemma"], {"mse": Rtn(bits=3, group_size=32, scale_search="mse"), "plain": Rtn(bits=3, group_size=32)}
    ),
)
def test_rounding_after_the_scales_is_better_than_alone(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, kind: str, quantizer: Rtn
) -> None:
    source = uneven(tiny_model(kind), tmp_path / "source")
    run_stage(AwqScale(bits=3, group_size=32, rounding="nearest", calibration=text), source, tmp_path / "scaled")
    run_stage(quantizer, tmp_path / "scaled", tmp_path / "both")
    run_stage(quantizer, source, tmp_path / "alone")
    assert distance(tmp_path / "both", source) < 0.98 * distance(tmp_path / "alone", source)


@pytest.mark.parametrize("type", ["nvfp4", "mxfp4"])
def test_floats_lose_less_behind_their_scales(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, type: Any
) -> None:
    source = uneven(tiny_model("llama"), tmp_path / "source")
    stage = AwqScale(type=type, activations="dynamic", calibration=text)
    report = run_stage(stage, source, tmp_path / "scaled")
    assert distance(tmp_path / "scaled", source) < 1e-5
    assert all(gain["scaled"] < gain["plain"] for gain in report.details["gains"].values())
    quantizer = Mx(type=type, activations="dynamic", rounding="gptq", calibration=text)
    for name in ("scaled", "source"):
        run_stage(Cast(dtype="bfloat16"), tmp_path / name, tmp_path / f"{name}-half")
        run_stage(quantizer, tmp_path / f"{name}-half", tmp_path / f"{name}-rounded")
    assert distance(tmp_path / "scaled-rounded", source) < 0.95 * distance(tmp_path / "source-rounded", source)


def test_layers_without_whole_blocks_are_named(model: Path, tmp_path: Path, text: Calibration) -> None:
    with changing(model) as tensors:
        for name, tensor in tensors.items():
            if ".mlp." in name:
                tensors[name] = (tensor[:, :120] if "down_proj" in name else tensor[:120]).contiguous()
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 120}), encoding="utf-8")
    report = run_stage(AwqScale(type="nvfp4", calibration=text), model, tmp_path / "scaled")
    left = {name: why for name, why in report.skipped.items() if "inputs" in why}
    assert left == {f"model.layers.{index}.mlp.down_proj": "its 120 inputs are no multiple of 16" for index in range(3)}
    assert distance(tmp_path / "scaled", model) < 1e-5


def test_layers_without_whole_blocks_are_not_scaled_for(tiny_model: TinyModel, text: Calibration) -> None:
    shape = Checkpoint(tiny_model("llama")).shape
    odd = {name: replace(info, shape=(*info.shape[:-1], info.shape[-1] + 4)) for name, info in shape.tensors.items()}
    with pytest.raises(StageError) as raised:
        AwqScale(type="nvfp4", calibration=text).predict(replace(shape, tensors=odd), "cpu")
    assert str(raised.value) == (
        "awq_scale.type: no layer's inputs are a multiple of 16. Blocks of nvfp4 are 16 inputs wide."
        " Take awq_scale out of the recipe."
    )


@pytest.mark.parametrize(
    ("fields", "unread"), [({"type": "nvfp4", "bits": 3}, "bits"), ({"activations": "dynamic"}, "activations")]
)
def test_fields_of_another_type_are_refused(fields: dict[str, Any], unread: str) -> None:
    named = fields.get("type", "int")
    with pytest.raises(ValidationError, match=f"{unread} would not be read with type: {named}. Leave it out"):
        AwqScale(**fields)


def test_overrides_and_lm_head(tiny_model: TinyModel, tmp_path: Path, text: Calibration) -> None:
    overrides: dict[str, Any] = {"*.down_proj": {"bits": 8}, "*.0.mlp.up_proj": {"method": "rtn"}, "*.k_proj": "keep"}
    stage = Awq(group_size=32, grid_points=3, lm_head=True, overrides=overrides, calibration=text)
    source = tiny_model("qwen2")
    report = run_stage(stage, source, tmp_path / "awq")
    after = Checkpoint(tmp_path / "awq")
    assert after.tensors == dict(stage.predict(Checkpoint(source).shape, "cpu")[1].tensors)
    assert after.tensors["model.layers.0.mlp.down_proj.weight_packed"].shape == (64, 32)
    assert "model.layers.0.self_attn.k_proj.weight" in after.tensors
    assert "lm_head.weight_packed" in after.tensors
    assert report.details["rounded_without_inputs"] == []
    assert distance(tmp_path / "awq", source) < 0.2


def test_experts_that_saw_few_tokens_are_said(tiny_model: TinyModel, tmp_path: Path, text: Calibration) -> None:
    warnings = Warnings()
    few = text.model_copy(update={"samples": 4})
    report = run_stage(
        Awq(symmetric=True, group_size=32, grid_points=3, calibration=few),
        tiny_model("mixtral"),
        tmp_path / "awq",
        Context(progress=warnings),
    )
    seldom = report.details["rounded_without_inputs"]
    assert seldom
    assert all(".experts." in name for name in seldom)
    assert warnings.lines == [
        f"{len(seldom):,} layers are rounded without regard to their inputs: they saw too few calibration tokens"
        f" ({seldom[0]}); raise awq.calibration.samples"
    ]


def test_conv1d_is_refused_before_any_work(tiny_model: TinyModel) -> None:
    with pytest.raises(StageError) as raised:
        Awq(group_size=32).predict(Checkpoint(tiny_model("gpt2")).shape, "cpu")
    assert str(raised.value) == (
        "awq: 8 layers are Conv1D (transformer.h.0.attn.c_attn, ...). compressed-tensors and "
        "awq hold Linear layers only. Put `- awq_scale` in front of `- gptq: {format: gptq}`."
    )


def test_a_model_whose_scales_cannot_be_folded_is_refused_with_the_reason(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration
) -> None:
    stage = Awq(group_size=32, include=("*.fc_out",), calibration=text)
    with pytest.raises(StageError) as raised:
        run_stage(stage, tiny_model("gptj"), tmp_path / "awq")
    assert str(raised.value) == (
        "awq: transformer.h.0.mlp.fc_out: no input of the chosen layers can be scaled. The output of "
        "transformer.h.0.mlp.fc_in reaches it through something that is not linear. Take gptq, which needs no scales."
    )


def test_too_few_tokens_are_refused(tiny_model: TinyModel, tmp_path: Path, text: Calibration) -> None:
    short = text.model_copy(update={"samples": 1})
    for stage in (Awq(group_size=32, calibration=short), AwqScale(group_size=32, calibration=short)):
        with pytest.raises(StageError, match=r"^calibration: the calibration text has 64 tokens, not 128\. .* Raise"):
            stage.predict(Checkpoint(tiny_model("llama")).shape, "cpu")
    with pytest.raises(StageError) as raised:
        run_stage(Awq(group_size=32, calibration=short), tiny_model("llama"), tmp_path / "awq")
    assert str(raised.value) == (
        "awq: model.layers.0: no input of the chosen layers can be scaled. Its layers saw fewer "
        "than 128 calibration tokens. Take gptq, which needs no scales."
    )


def test_the_format_awq_refuses_what_it_cannot_hold(tiny_model: TinyModel) -> None:
    shape = Checkpoint(tiny_model("llama")).shape
    with pytest.raises(StageError) as raised:
        Awq(format="awq", group_size=32, overrides={"*.up_proj": {"group_size": 16}}).predict(shape, "cpu")  # type: ignore[dict-item]
    assert str(raised.value) == (
        "awq.overrides: model.layers.0.mlp.down_proj has 4 bits, groups of 32, asymmetric and "
        "model.layers.0.mlp.up_proj has 4 bits,"
        " groups of 16, asymmetric. The format awq has one form for all layers. Set awq.format to compressed-tensors."
    )
    with pytest.raises(
        StageError, match=r"^model.layers.0.mlp.down_proj: 128 columns are not a multiple of group_size 48"
    ):
        Awq(format="awq", group_size=48).predict(shape, "cpu")
    name = "model.layers.0.mlp.up_proj.weight"
    odd = replace(shape, tensors={**shape.tensors, name: TensorInfo("F32", (124, 64))})
    with pytest.raises(StageError) as raised:
        Awq(format="awq", group_size=32).predict(odd, "cpu")
    assert str(raised.value) == (
        "model.layers.0.mlp.up_proj: 124 outputs are not a multiple of 8. The format awq packs outputs in eights."
        " Set awq.format to compressed-tensors, or exclude the layer."
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("bits: 3", "holds 4 bits with zero points: set bits: 4 and symmetric: false, or format: compressed-tensors"),
        (
            "symmetric: true",
            "holds 4 bits with zero points: set bits: 4 and symmetric: false, or format: compressed-tensors",
        ),
        ("lm_head: true", "keeps lm_head as it is: set lm_head: false, or format: compressed-tensors"),
    ],
)
def test_fields_that_the_format_awq_has_not(tmp_path: Path, fields: str, said: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"model: smollm2-135m\nstages:\n  - awq: {{format: awq, {fields}}}\n", encoding="utf-8")
    with pytest.raises(RecipeError, match=f": the format awq {said}"):
        load_recipe(path)


def test_inputs_that_are_not_finite_are_refused(tmp_path: Path, model: Path, text: Calibration) -> None:
    with changing(model) as tensors:
        tensors["model.layers.0.mlp.up_proj.weight"] *= 1e30
        tensors["model.layers.0.mlp.gate_proj.weight"] *= 1e30
    with pytest.raises(StageError, match=r"down_proj: the inputs of the layer are NaN or Inf on the calibration text"):
        run_stage(Awq(group_size=32, calibration=text), model, tmp_path / "awq")
    assert json.loads((model / "config.json").read_text())["model_type"] == "llama"
