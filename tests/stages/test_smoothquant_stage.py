"""Stage smoothquant: outliers move into the weights and nothing else changes; what is reported, and
what is refused.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from optkit.algorithms.microscaling import rounded_inputs
from optkit.algorithms.smoothing import OF_FLOATS, Reader, search_smoothing, smoothing_scales
from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.session import open_session
from optkit.stage import Report
from optkit.stages.quantizing.input_ranges import InputRange
from optkit.stages.smoothquant import SmoothQuant
from tests.conftest import TinyModel
from tests.support.changes import changing
from tests.support.crossed import crossed
from tests.support.running import run_stage
from tests.support.tiny_models import save_tokenizer

TEXT: Any = {"dataset": "python-reference", "samples": 6, "sequence_length": 64}
TOKENS = torch.arange(40, 90)[None]
OUTLIERS = (3, 17)


def run(source: Path, target: Path, **fields: Any) -> Report:
    return run_stage(SmoothQuant(calibration=TEXT, **fields), source, target)


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.fixture(scope="module")
def outliers(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a llama that computes what the tiny one does, with two channels of each norm's output
    100 times larger.
    """
    directory = Path(shutil.copytree(tiny_model("llama"), tmp_path_factory.mktemp("outliers") / "llama"))
    with changing(directory) as tensors:
        for name, tensor in tensors.items():
            if "layernorm" in name:
                tensor[list(OUTLIERS)] *= 100
            elif any(name.endswith(f"{leaf}_proj.weight") for leaf in ("q", "k", "v", "gate", "up")):
                tensor[:, list(OUTLIERS)] /= 100
    return directory


@pytest.mark.parametrize(("alpha", "activations"), crossed([0.5, "search"], ["dynamic", "static"]))
def test_outliers_no_longer_hurt(
    alpha: Any, activations: str, tiny_model: TinyModel, outliers: Path, tmp_path: Path
) -> None:
    tokens = TOKENS
    exact = open_session(outliers).logits(tokens)
    torch.testing.assert_close(exact, open_session(tiny_model("llama")).logits(tokens), rtol=1e-3, atol=1e-3)
    run(outliers, tmp_path / "smooth", alpha=alpha, activations=activations)
    run(tiny_model("llama"), tmp_path / "easy", alpha=alpha, activations=activations)
    smooth, easy = (apart(open_session(tmp_path / name).logits(tokens), exact) for name in ("smooth", "easy"))
    assert smooth < 1.5 * easy < 0.2
    config = json.loads((tmp_path / "smooth" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "int-quantized"
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] == (activations == "dynamic")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3", "gptj", "opt"])
def test_folding_changes_no_output(kind: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """With the weights put back in float, the smoothed model computes what the original does; only
    rounding is left.
    """
    source, target = tiny_model(kind), tmp_path / "smooth"
    report = run(source, target, alpha=0.5)
    before, after = Checkpoint(source), Checkpoint(target)
    tensors = {}
    for name in before.tensors:
        stored = after.read(name)
        scale = f"{name.removesuffix('.weight')}.weight_scale"
        tensors[name] = stored.float() * after.read(scale) if scale in after.tensors else stored
    shutil.copytree(source, tmp_path / "float")
    save_file(tensors, tmp_path / "float" / "model.safetensors", metadata={"format": "pt"})
    plain = open_session(source).logits(TOKENS)
    rounded_weights, all_rounded = (
        apart(open_session(tmp_path / name).logits(TOKENS), plain) for name in ("float", "smooth")
    )
    assert 0 < rounded_weights < (0.1 if "x" in kind or "moe" in kind else 0.05)  # a token may go to another expert
    assert all_rounded < 0.15
    norms = [name for name in before.tensors if name.endswith("weight") and len(before.tensors[name].shape) == 1]
    assert any(not torch.equal(before.read(name), after.read(name)) for name in norms)
    assert set(report.details["smoothing"].values()) == {"alpha 0.5"}
    cost, shape = SmoothQuant(calibration=TEXT).predict(before.shape, "cpu")
    assert shape.tensors == after.tensors
    assert cost.disk_bytes == after.shape.size_bytes
    assert report.calibrated_on[0]["dataset"] == "python-reference"


def test_norms_alone_as_in_the_paper(tiny_model: TinyModel, tmp_path: Path) -> None:
    report = run(tiny_model("llama"), tmp_path / "smooth", folding="norms")
    assert all(name.endswith("layernorm") for name in report.details["smoothing"])
    unsmoothed = report.details["unsmoothed"]
    assert {name.rpartition(".")[2] for name in unsmoothed} == {"o_proj", "down_proj"}
    assert set(unsmoothed.values()) == {"a linear layer makes its input, and folding: norms leaves it alone"}


def test_layers_that_cannot_be_smoothed_are_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    report = run(tiny_model("gptj"), tmp_path / "smooth")
    assert {name.rpartition(".")[2] for name in report.details["unsmoothed"]} == {"fc_out"}
    assert len(report.notes) == 1
    assert report.notes[0].startswith(
        "2 layers are rounded without smoothing (transformer.h.0.mlp.fc_out: the output of"
    )


def test_layers_that_stay_float_take_the_scales_too(tiny_model: TinyModel, tmp_path: Path) -> None:
    """q_proj is excluded: it stays float and its columns are multiplied by the scales of the norm
    that feeds k and v as well.
    """
    source, target = tiny_model("llama"), tmp_path / "smooth"
    report = run(source, target, alpha=0.5, exclude=("*.q_proj", "*.mlp.*"))
    assert report.notes[0].startswith(
        "vLLM joins model.layers.0.self_attn.k_proj with v_proj, q_proj and opens them in one form only, and so in"
    )
    before, after = Checkpoint(source), Checkpoint(target)
    name = "model.layers.1.self_attn.q_proj.weight"
    norm = "model.layers.1.input_layernorm.weight"
    assert after.tensors[name].dtype == "F32"
    torch.testing.assert_close(after.read(name), before.read(name) * (before.read(norm) / after.read(norm)))
    untouched = "model.layers.1.post_attention_layernorm.weight"
    assert torch.equal(after.read(untouched), before.read(untouched))
    assert apart(open_session(target).logits(TOKENS), open_session(source).logits(TOKENS)) < 0.1


def test_bfloat16(tiny_model: TinyModel, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    save_tokenizer(tmp_path / "half")
    run(tmp_path / "half", tmp_path / "smooth")
    assert {info.dtype for name, info in Checkpoint(tmp_path / "smooth").tensors.items() if "norm" in name} == {"BF16"}
    assert apart(open_session(tmp_path / "smooth").logits(TOKENS), open_session(tmp_path / "half").logits(TOKENS)) < 0.1


def test_models_without_a_place_for_the_scales(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
    }
    config = AutoConfig.for_model("olmo", **sizes)  # its norms have no weights
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "olmo")
    save_tokenizer(tmp_path / "olmo")
    message = (
        r"smoothquant: no layer of the first block can be smoothed, .*q_proj for one: no norm "
        r"or.*nowhere to go\. Use fp8"
    )
    with pytest.raises(StageError, match=message):
        run(tmp_path / "olmo", tmp_path / "smooth", folding="norms")
    report = run(tmp_path / "olmo", tmp_path / "linear")
    assert {name.rpartition(".")[2] for name in report.details["smoothing"]} == {"v_proj", "up_proj"}


def test_conv1d_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"smoothquant: 8 layers are Conv1D"):
        run(tiny_model("gpt2"), tmp_path / "smooth")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alpha": 1.5}, "less than or equal to 1"),
        ({"alpha": "best"}, "'search'"),
        ({"activations": "none"}, "'dynamic' or 'static'"),
    ],
)
def test_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SmoothQuant(**fields)


def test_scales_of_the_paper() -> None:
    inputs, weights = torch.tensor([16.0, 1.0, 4.0, 0.0]), torch.tensor([1.0, 4.0, 0.25, 1.0])
    scales = smoothing_scales(inputs, weights, 0.5)
    expected = (inputs / weights).sqrt()[:3]
    torch.testing.assert_close(scales[:3] / scales[0], expected / expected[0])
    assert float(scales[:3].log().sum()) == pytest.approx(0, abs=1e-6)
    assert float(scales[3]) == 1
    shared = smoothing_scales(inputs, weights, 0.5, torch.tensor([0, 1, 1, 2]))
    torch.testing.assert_close(shared[1] / shared[0], torch.tensor((4 / 4) ** 0.5 / 4))
    assert shared[1] == shared[2]


def output_error(weight: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor, static: bool) -> float:
    """Return the relative squared error of the outputs once inputs and weight are rounded with the
    scales folded in, written out.
    """
    steps = (rows / scales).abs().amax(1, keepdim=True) / 127.5
    steps = steps.max() if static else steps
    inputs = ((rows / scales / steps).round().clamp(-128, 127) * steps).double()
    smoothed = weight * scales
    of_row = smoothed.abs().amax(1, keepdim=True) / 127.5
    rounded = ((smoothed / of_row).round().clamp(-128, 127) * of_row).double()
    wanted = rows.double() @ weight.double().T
    return float((inputs @ rounded.T - wanted).square().sum() / wanted.square().sum())


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("same", [None, torch.arange(96) // 4])
def test_the_search_beats_every_alpha(static: bool, same: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(64, 96), torch.randn(40, 96) * torch.rand(96)
    rows = rows * torch.randn(96).exp()
    rows[:, 5] *= 80
    rows /= rows.norm(dim=1, keepdim=True)  # tokens count the same in the search
    amaxes = rows.abs().amax(0), weight.abs().amax(0)
    readers = [Reader(weight, rows, rows.square().mean(0) * 96)]
    name, found = search_smoothing(readers, *amaxes, same, "static" if static else "dynamic")
    scales = found.scales
    assert name == "descent"
    if same is not None:
        assert torch.equal(scales, scales[::4].repeat_interleave(4))
    found = output_error(weight, rows, scales, static)
    assert found < 0.5 * output_error(weight, rows, torch.ones(96), static)
    for alpha in (0.3, 0.5, 0.7, 0.9):
        assert found < 1.02 * output_error(weight, rows, smoothing_scales(*amaxes, alpha, same), static)


@pytest.mark.parametrize(("type", "inputs"), [("nvfp4", "dynamic"), ("nvfp4", "none"), ("mxfp4", "dynamic")])
def test_floats_in_blocks_lose_about_what_was_expected(type: str, inputs: Any) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(512, 96), torch.randn(80, 96)
    rows = rows * torch.randn(96).exp()
    rows /= rows.square().mean(1, keepdim=True).sqrt()
    amaxes, reader = (rows.abs().amax(0), weight.abs().amax(0)), Reader(weight, rows, rows.square().mean(0))
    _, found = search_smoothing([reader], *amaxes, None, inputs, OF_FLOATS[type])

    def error(scales: torch.Tensor) -> float:
        def rounded(values: torch.Tensor) -> torch.Tensor:
            return rounded_inputs(values, torch.ones(1) if type == "nvfp4" else None)

        given, wanted = rows / scales, rows @ weight.T
        outputs = (rounded(given) if inputs == "dynamic" else given) @ rounded(weight * scales).T
        return float((outputs - wanted).square().sum() / wanted.square().sum())

    plain, smoothed = error(torch.ones(96)), error(found.scales)
    assert plain == pytest.approx(found.plain_error, rel=0.25)
    assert smoothed == pytest.approx(found.error, rel=0.25)
    assert smoothed < 0.8 * plain


def test_nothing_is_smoothed_where_nothing_is_gained() -> None:
    rows, weight = torch.ones(8, 4), torch.ones(3, 4)
    name, found = search_smoothing([Reader(weight, rows, torch.ones(4))], rows[0], weight[0], None)
    assert (name, found.scales.tolist()) == ("none", [1.0] * 4)


def test_a_hessian_is_factored_once_for_layers_that_share_it(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[InputRange] = []

    def variances(self: InputRange) -> torch.Tensor:
        seen.append(self)
        return self.amax + 1

    monkeypatch.setattr(InputRange, "variances", variances)
    source = tiny_model("llama")
    run(source, tmp_path / "made")
    assert len(seen) == 4 * Checkpoint(source).shape.block_count, "of q, k, v; of o; of gate, up; of down"
