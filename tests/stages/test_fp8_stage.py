"""Stage fp8: what it writes and reports, and everything that it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM

from optkit.algorithms.eight_bit import FLOAT8, amax_scales, quantize, search_scales, tile_of
from optkit.errors import SourceError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.session import open_session
from optkit.stages.fp8 import Fp8
from optkit.stages.quantizing import hessians as layer_inputs
from tests.conftest import TinyModel
from tests.support.changes import changing
from tests.support.crossed import crossed
from tests.support.running import run_stage

TEXT: dict[str, Any] = {"dataset": "python-reference", "samples": 6, "sequence_length": 64}
STATIC: dict[str, Any] = {"activations": "static", "calibration": TEXT}
TOKENS = torch.arange(40, 90)[None]


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random llama whose matrices are multiples of 128."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
    }
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("square")
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("scales", ["channel", "tensor", "block"])
@pytest.mark.parametrize("search", ["amax", "mse"])
def test_weights_are_rounded_with_their_scales(scales: Any, search: Any, square: Path, tmp_path: Path) -> None:
    report = run_stage(Fp8(scales=scales, scale_search=search), square, tmp_path / "fp8")
    before, after = Checkpoint(square), Checkpoint(tmp_path / "fp8")
    assert report.changed == 14
    for name in before.tensors:
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj"):
            assert torch.equal(before.read(name), after.read(name))
            continue
        weight = before.read(name)
        tile = tile_of(scales, tuple(weight.shape))  # type: ignore[arg-type]
        expected = {"amax": amax_scales, "mse": search_scales}[search](weight, tile, FLOAT8, torch.float32)
        assert torch.equal(after.read(f"{layer}.weight_scale").view_as(expected), expected)
        codes = after.read(name)
        assert torch.equal(codes.float(), quantize(weight, expected, tile, FLOAT8).float())
    scales_bits = {"channel": 32 / 160, "tensor": 0.0, "block": 32 / 128**2}[scales]
    assert report.details["quantized_bits_per_weight"] == pytest.approx(8 + scales_bits, abs=0.15)
    assert report.calibrated_on == ()


@pytest.mark.parametrize(
    ("kind", "fields"),
    crossed(["qwen2", "llama", "gemma", "opt", "mixtral", "gptj", "qwen2_moe"], {"dynamic": {}, "static": STATIC}),
)
def test_models_stay_what_they_were(kind: str, fields: dict[str, Any], tiny_model: TinyModel, tmp_path: Path) -> None:
    stage = Fp8(**fields)
    report = run_stage(stage, tiny_model(kind), tmp_path / "fp8")
    assert (
        1e-3
        < apart(open_session(tmp_path / "fp8").logits(TOKENS), open_session(tiny_model(kind)).logits(TOKENS))
        < 0.25
    )
    checkpoint = Checkpoint(tmp_path / "fp8")
    cost, shape = stage.predict(Checkpoint(tiny_model(kind)).shape, "cpu")
    assert shape.tensors == checkpoint.tensors
    assert cost.disk_bytes == checkpoint.shape.size_bytes
    assert cost.ram_bytes > 0
    assert (len(report.calibrated_on) == 1) == bool(fields)
    assert all(reason in ("router", "outside the decoder blocks") for reason in report.skipped.values())


def test_blocks_round_their_inputs_in_groups(square: Path, tmp_path: Path) -> None:
    run_stage(Fp8(scales="block"), square, tmp_path / "block")
    group = json.loads((tmp_path / "block" / "config.json").read_text())["quantization_config"]["config_groups"][
        "group_0"
    ]
    assert group["input_activations"]["group_size"] == 128
    session, plain = open_session(tmp_path / "block"), open_session(square)
    assert "fp8: 14 of 14 layers are dequantized at each call, inputs are rounded in groups" in session.notes
    run_stage(Fp8(scales="block", activations="none"), square, tmp_path / "weights")
    weights_alone = apart(open_session(tmp_path / "weights").logits(TOKENS), plain.logits(TOKENS))
    assert weights_alone < apart(session.logits(TOKENS), plain.logits(TOKENS)) < 0.2


def test_static_scales_reach_every_calibrated_input(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The scale of the first block's q_proj is that of the largest input in float; later ones come
    from what quantized blocks return.
    """
    source = tiny_model("llama")
    stage = Fp8(**STATIC)
    run_stage(stage, source, tmp_path / "fp8")
    assert stage.calibration is not None
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    seen: dict[str, float] = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(
                lambda _, given, name=name: seen.update({name: float(given[0].abs().max())})
            )
    with torch.no_grad():
        model(stage.calibration.tokens(source, None))
    checkpoint = Checkpoint(tmp_path / "fp8")
    scales = {name: float(checkpoint.read(f"{name}.input_scale")) * 448 for name in seen}
    first = "model.layers.0.self_attn.q_proj"
    assert scales[first] == pytest.approx(seen[first], rel=1e-5)
    assert all(scales[name] == pytest.approx(seen[name], rel=0.3) for name in seen)
    later = [name for name in seen if ".2." in name]
    assert any(scales[name] != pytest.approx(seen[name], rel=1e-5) for name in later)


def test_an_expert_without_tokens_is_calibrated_as_the_others(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_model("mixtral"), tmp_path / "source"))
    with changing(source) as tensors:
        router = next(name for name in tensors if name.endswith("0.block_sparse_moe.gate.weight"))
        tensors[router] = torch.zeros_like(tensors[router])  # all alike: every token goes to the same two experts
    report = run_stage(Fp8(**STATIC), source, tmp_path / "fp8")
    without = report.details["calibrated_as_others"]
    assert len(without) == 6
    assert all(".0.block_sparse_moe.experts." in name for name in without)
    checkpoint = Checkpoint(tmp_path / "fp8")
    for leaf in ("w1", "w2", "w3"):
        prefix = "model.layers.0.block_sparse_moe.experts"
        scales = {index: float(checkpoint.read(f"{prefix}.{index}.{leaf}.input_scale")) for index in range(4)}
        seen = [scale for index, scale in scales.items() if f"{prefix}.{index}.{leaf}" not in without]
        assert all(scales[index] == max(seen) for index in scales if f"{prefix}.{index}.{leaf}" in without)


def test_layers_without_any_token_are_refused(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_inputs, "watch_inputs", lambda *_: {})
    with pytest.raises(
        StageError, match=r"q_proj: no token of the calibration text reached the layer\. Raise fp8\.calibration"
    ):
        run_stage(Fp8(**STATIC), tiny_model("llama"), tmp_path / "fp8")


def test_inputs_that_are_not_numbers(tmp_path: Path, model: Path) -> None:
    with changing(model) as tensors:
        tensors["model.layers.1.mlp.up_proj.weight"].fill_(3e38)
    with pytest.raises(
        StageError, match=r"layers\.1\.mlp\.down_proj: the inputs of the layer are NaN or Inf.*do not fit float32"
    ):
        run_stage(Fp8(**STATIC), model, tmp_path / "fp8")


def test_conv1d_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(
        StageError, match=r"fp8: 8 layers are Conv1D \(.*Linear layers only\. Use gptq with format: gptq"
    ):
        run_stage(Fp8(), tiny_model("gpt2"), tmp_path / "fp8")


def test_blocks_that_do_not_fill_the_weights(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(
        StageError, match=r"q_proj: 64 x 64 weights: not both are multiples of 128, and so for 20 .*scales to channel"
    ):
        run_stage(Fp8(scales="block"), tiny_model("llama"), tmp_path / "fp8")


def test_experts_half_left_out(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="is left out and other experts beside it are not"):
        run_stage(Fp8(exclude=("*.experts.0.*",)), tiny_model("mixtral"), tmp_path / "fp8")


def test_weights_that_are_not_numbers(tmp_path: Path, model: Path) -> None:
    with changing(model) as tensors:
        tensors["model.layers.1.mlp.up_proj.weight"][0] = torch.nan
    with pytest.raises(SourceError, match=r"up_proj\.weight: 64 of 8,192 weights are NaN or Inf"):
        run_stage(Fp8(), model, tmp_path / "fp8")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"calibration": TEXT},
            "the calibration text would not be read: take it out, or set rounding: gptq, or activations: static",
        ),
        ({"scales": "block", **STATIC}, "no static activations beside weights in blocks: set activations: dynamic, or"),
        ({"activations": "static"}, "activations: static needs a text: add calibration: {dataset: c4}, or take it out"),
        ({"rounding": "gptq"}, "rounding: gptq needs a text: add calibration: {dataset: c4}, or take it out"),
        ({"scales": "row"}, "'channel', 'tensor' or 'block'"),
    ],
)
def test_fields_that_contradict_each_other(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Fp8(**fields)
