"""Stage `qat`: what is trained is what is written, and it is better than what it began with."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from optkit.algorithms.packing import unpack_compressed_tensors, unpack_gptq
from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.session import open_session
from optkit.stage import Context, Format, Report
from optkit.stages.gptq import Gptq
from optkit.stages.prune import Prune
from optkit.stages.qat import Qat, QatTrainer
from optkit.stages.rtn import Rtn
from optkit.training.fake_quantization import FakeQuantized
from optkit.training.loop import Loop
from optkit.training.memory_kinds import MemoryKinds
from tests.support.running import run_stage

TinyModel = Callable[[str], Path]
LENGTH = 32


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a text in which each letter says something about the next."""
    torch.manual_seed(0)
    follows = torch.randint(97, 123, (26, 3))
    letters = [97]
    for choice in torch.randint(0, 3, (40_000,)).tolist():
        letters.append(int(follows[letters[-1] - 97, choice]))
    path = tmp_path_factory.mktemp("text") / "chain.txt"
    path.write_text("".join(map(chr, letters)), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def trained_model(tiny_model: TinyModel, text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny Llama that has learned the text."""
    from optkit.source.training_text import TrainingText
    from optkit.training.data import read_texts

    source, target = tiny_model("llama"), tmp_path_factory.mktemp("trained") / "llama"
    data = read_texts([TrainingText(dataset=text)], source, LENGTH, 8, None)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(80):
        tokens = data.tokens[data.rows(16 * step, 16)]
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    from transformers import AutoTokenizer

    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return target


@pytest.fixture
def fields(text: str) -> dict[str, Any]:
    training = {
        "texts": [{"dataset": text}],
        "sequence_length": LENGTH,
        "batch_size": 8,
        "tokens": 40 * 8 * LENGTH,
        "held_out": 8,
    }
    training |= {"evaluations": 4, "precision": "float32", "learning_rate": 1e-4}
    return {
        "bits": 3,
        "group_size": 32,
        "calibration": {"dataset": text, "samples": 16, "sequence_length": LENGTH},
        "training": training,
    }


@pytest.fixture
def last(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeQuantized]:
    """Return the layers of the last step, once they are written."""
    layers: dict[str, FakeQuantized] = {}
    write = QatTrainer._write

    def remember(self: QatTrainer, student: Any, target: Path, context: Context) -> int:
        layers.update(student.layers)
        return write(self, student, target, context)

    monkeypatch.setattr(QatTrainer, "_write", remember)
    return layers


def quick(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a short training that moves codes."""
    changes = {"tokens": 8 * 8 * LENGTH, "learning_rate": 1e-3, "divergence": 0, "cross_entropy": 1}
    return {**fields, "training": {**fields["training"], **changes}}


def beginning(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields without a calibration text if the codes to begin with read none."""
    return {name: value for name, value in fields.items() if name != "calibration" or fields.get("start") != "rtn"}


def run(stage: Any, source: Path, target: Path) -> Report:
    return run_stage(stage, source, target, Context(origin=source))


def stored(directory: Path, bits: int) -> dict[str, Tensor]:
    """Return the weights that the codes of a directory stand for, float32, by layer."""
    checkpoint = Checkpoint(directory)
    layers: dict[str, dict[str, Tensor]] = {}
    for name in checkpoint.tensors:
        layer, _, leaf = name.rpartition(".")
        layers.setdefault(layer, {})[leaf] = checkpoint.read(name)
    read = {"weight_packed": unpack_compressed_tensors, "qweight": unpack_gptq}
    found = {name: read[leaf](parts, bits) for name, parts in layers.items() for leaf in read if leaf in parts}
    return {
        name: weight.dequantize().float() if weight.scales.dtype == torch.float32 else _widened(weight)
        for name, weight in found.items()
    }


def _widened(weight: Any) -> Tensor:
    return replace(weight, scales=weight.scales.float()).dequantize()


def divergence_of(directory: Path, source: Path, data: Tensor) -> float:
    ours, theirs = (open_session(each).logits(data).log_softmax(-1) for each in (directory, source))
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"scales": "recomputed", "start": "rtn", "symmetric": False}),
        ("qwen2", {"bits": 2, "symmetric": False, "scales": "fixed"}),
        ("gpt2", {"format": "gptq"}),
        ("mixtral", {"bits": 4}),
    ],
)
def test_the_file_holds_the_weights_of_the_last_step_bit_for_bit(
    tiny_model: TinyModel,
    tmp_path: Path,
    fields: dict[str, Any],
    last: dict[str, FakeQuantized],
    kind: str,
    changes: dict[str, Any],
) -> None:
    stage = Qat(**beginning({**quick(fields), **changes}))
    report = run(stage, tiny_model(kind), tmp_path / "done")
    found = stored(tmp_path / "done", stage.bits)
    assert found.keys() == last.keys()
    assert len(found) == report.changed
    for name, weight in found.items():
        assert torch.equal(weight, last[name].rounded()), name
    assert report.details["changed_codes"] > 0
    assert {each["dataset"] for each in report.calibrated_on} == {fields["calibration"]["dataset"]}


W8A8 = {"bits": 8, "group_size": None, "activations": "dynamic"}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_with_rounded_inputs_the_opened_layers_compute_what_was_trained(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any], last: dict[str, FakeQuantized], kind: str
) -> None:
    source, stage = tiny_model(kind), Qat(**beginning({**quick(fields), **W8A8, "start": "rtn"}))
    shape = Checkpoint(source).shape
    report = run(stage, source, tmp_path / "done")
    done = Checkpoint(tmp_path / "done")
    cost, left = stage.predict(shape, "cpu")
    assert left.tensors == done.tensors
    told = MemoryKinds.model_validate(report.details["training"]["predicted"])
    assert cost.ram_bytes == told.total + left.size_bytes, "the scorecard says what the plan said"
    assert report.details["changed_codes"] > 0
    model: Any = open_session(tmp_path / "done", dtype="float32").model
    for name, layer in last.items():
        codes, scales = done.read(f"{name}.weight"), done.read(f"{name}.weight_scale")
        assert codes.dtype == torch.int8
        assert torch.equal(codes * scales.float(), layer.rounded()), name
        hidden = torch.randn(7, layer.in_features)
        assert torch.allclose(model.get_submodule(name)(hidden), layer(hidden), atol=1e-5), name
    group = done.config["quantization_config"]["config_groups"]["group_0"]
    assert group["format"] == "int-quantized"
    assert group["input_activations"] == {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "dynamic": True,
        "strategy": "token",
    }


@pytest.mark.skipif(sys.platform != "linux", reason="processes are ended by Linux's means")
@pytest.mark.slow  # test_ranks trains in two processes too
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_two_processes_end_in_the_codes_of_one(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any], parallel: str
) -> None:
    training = {**fields["training"], "tokens": 6 * 8 * LENGTH, "learning_rate": 1e-3, "parallel": parallel}
    shared = beginning({**fields, "start": "rtn"})
    one = run(Qat(**{**shared, "training": training}), tiny_model("llama"), tmp_path / "one")
    two = run(Qat(**{**shared, "training": {**training, "devices": 2}}), tiny_model("llama"), tmp_path / "two")
    assert dict(two.details["curve"]) == pytest.approx(dict(one.details["curve"]), rel=1e-4)
    expected, found = stored(tmp_path / "one", 3), stored(tmp_path / "two", 3)
    differ = [float((found[name] - weight).abs().gt(1e-3).float().mean()) for name, weight in expected.items()]
    assert found.keys() == expected.keys()
    assert max(differ) < 0.01  # weights that lie between two codes


def test_a_run_that_was_killed_goes_on_with_the_codes_that_it_began_with(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, place = tiny_model("llama"), tmp_path / "work"
    stage = Qat(**{**fields, "training": {**fields["training"], "tokens": 4 * 8 * LENGTH}})
    whole = run(stage, source, tmp_path / "whole")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(QatTrainer, "_write", killed)
        run_stage(stage, source, tmp_path / "first", Context(origin=source, workspace=place))
    monkeypatch.setattr(Qat, "start_weights", killed)
    report = run_stage(stage, source, tmp_path / "second", Context(origin=source, workspace=place))
    assert report.calibrated_on == whole.calibrated_on
    assert report.details["losses"] == whole.details["losses"]
    expected = stored(tmp_path / "whole", 3)
    for name, weight in stored(tmp_path / "second", 3).items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("keep_zeros", ["auto", False])
def test_zeros_of_a_pruned_model_stay_or_are_counted_when_all_is_over(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any], keep_zeros: bool | str
) -> None:
    source, training = (
        tmp_path / "pruned",
        {**fields["training"], "learning_rate": 1e-2, "divergence": 0, "cross_entropy": 1},
    )
    run(Prune(method="magnitude", include=("*.mlp.*",)), tiny_model("llama"), source)
    stage = Qat(**{**fields, "bits": 4, "keep_zeros": keep_zeros, "training": training})
    report = run_stage(stage, source, tmp_path / "done", Context(origin=tiny_model("llama")))
    found = {name: weight == 0 for name, weight in stored(tmp_path / "done", 4).items() if ".mlp." in name}
    after = sum(int(zeros.sum()) for zeros in found.values()) / sum(zeros.numel() for zeros in found.values())
    assert report.details["zeros"] == {"layers": 9, "before": 0.5, "after": pytest.approx(after)}
    assert f"{after:.1%} are now" in report.notes[-1]
    before = Checkpoint(source)
    if keep_zeros:
        assert all(bool(found[name][before.read(f"{name}.weight") == 0].all()) for name in found)
        assert after >= 0.5
    else:
        assert after < 0.45


def test_codes_that_another_stage_left_are_not_begun_with(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are its checkpoints gone on with; where the workspace lies decides nothing."""
    source, shared = (
        tiny_model("llama"),
        beginning({**fields, "start": "rtn", "training": {**fields["training"], "tokens": 4 * 8 * LENGTH}}),
    )
    monkeypatch.setattr(Loop, "_checkpoint_due", lambda loop: loop.place is not None and loop.course.step == 2)
    for name, work, bits in (("one", "here", 2), ("two", "here", 4), ("three", "there", 4)):
        if work == "there":
            (tmp_path / "here").rename(tmp_path / "there")
        report = run_stage(
            Qat(**{**shared, "bits": bits}), source, tmp_path / name, Context(origin=source, workspace=tmp_path / work)
        )
        assert report.details["resumed_at"] == ([] if work == "here" else [2])
    run(Qat(**{**shared, "bits": 4}), source, tmp_path / "alone")
    expected = stored(tmp_path / "alone", 4)
    for name in ("two", "three"):
        assert all(torch.equal(weight, expected[layer]) for layer, weight in stored(tmp_path / name, 4).items())


def test_it_is_better_than_what_it_begins_with_and_than_rounding(
    trained_model: Path, tmp_path: Path, fields: dict[str, Any], text: str
) -> None:
    from optkit.source.training_text import TrainingText
    from optkit.training.data import read_texts

    data = read_texts([TrainingText(dataset=text)], trained_model, LENGTH, 8, None)
    held_out = data.tokens[list(data.held_out)]
    shared = {name: fields[name] for name in ("bits", "group_size")}
    report = run(Qat(**fields), trained_model, tmp_path / "qat")
    run(Gptq(**shared, calibration=fields["calibration"]), trained_model, tmp_path / "gptq")
    run(Rtn(**shared), trained_model, tmp_path / "rtn")
    qat, gptq, rtn = (divergence_of(tmp_path / name, trained_model, held_out) for name in ("qat", "gptq", "rtn"))
    assert qat < 0.75 * gptq
    assert qat < 0.25 * rtn
    curve = [loss for _, loss in report.details["curve"]]
    assert sum(curve[-5:]) < sum(curve[:5])
    assert report.details["held_out_before"]["divergence"] == pytest.approx(gptq, rel=0.02)
    assert report.details["held_out_after"]["divergence"] == pytest.approx(qat, rel=0.02)


def test_the_plan_counts_the_training(tiny_model: TinyModel, fields: dict[str, Any]) -> None:
    shape = Checkpoint(tiny_model("llama")).shape
    gptq = Gptq(**{name: value for name, value in fields.items() if name != "training"})
    ours, theirs = Qat(**fields).predict(shape, "cpu"), gptq.predict(shape, "cpu")
    assert ours[1] == theirs[1]
    assert ours[0].ram_bytes > theirs[0].ram_bytes
    assert Qat.leaves(Format.CHECKPOINT) is Format.QUANTIZED
    larger = Checkpoint(tiny_model("qwen2")).shape
    beside = Qat(**fields).predict_beside(shape, "cpu", larger)[0]
    assert beside.ram_bytes - ours[0].ram_bytes == 4 * (larger.elements - shape.elements)
    on_gpu = [Qat(**fields).predict_beside(shape, "cuda", teacher)[0].gpu_bytes for teacher in (shape, larger)]
    assert on_gpu[1] - on_gpu[0] == 4 * (larger.elements - shape.elements)
    long = Qat(**{**fields, "training": {**fields["training"], "sequence_length": 1024}})
    with pytest.raises(StageError, match="qat.training: sequences of 1,024 tokens, and the model was built for 512"):
        long.predict(shape, "cpu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lm_head": True}, "qat trains the layers of the decoder blocks. Leave lm_head out."),
        ({"activations": "dynamic"}, "set bits: 8, group_size: null, symmetric: true and format: compressed-tensors"),
        (
            {"activations": "dynamic", "bits": 8, "group_size": None, "overrides": {"*": {"bits": 4}}},
            "without other bits or groups",
        ),
        (
            {"start": "rtn", "calibration": {"dataset": "c4"}},
            "calibration would not be read: take it out, or set start: gptq",
        ),
        ({"start": "rtn", "refinements": 0}, "refinements would not be read"),
        ({"backend": "gptqmodel"}, "Input should be 'optkit'"),
    ],
)
def test_what_it_does_not_do(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Qat(**changes)
