"""What a training leaves in the scorecard: the curve that is kept, the sentence."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit import pipeline
from optkit.devices.datasheets import Device
from optkit.model.checkpoint import Checkpoint
from optkit.model.shape import ModelShape
from optkit.recipe.recipe import load_recipe
from optkit.scorecard import Scorecard, StepLine, Training, to_markdown, training_line, trainings
from optkit.training.memory_kinds import MemoryKinds
from optkit.training.ranks import Ranks
from optkit.training.training_options import Course, TrainingResult
from optkit.training.training_record import Judged, Point, SpeedRecord, TrainingRecord, fewer, thinned
from optkit.training.training_report import Spent, Trainee, account

SPEED = SpeedRecord(
    tokens_per_s=12288.2,
    tflops_per_s=11.23,
    hardware_tflops_per_s=14.4,
    flops="3.0 x forward",
    mfu=0.412,
    hfu=0.529,
    peak="bf16 of a device, its datasheet",
)


def points(losses: list[float], tokens_per_step: int = 512) -> tuple[Point, ...]:
    return tuple(
        Point(step=step, tokens=step * tokens_per_step, loss=loss, learning_rate=1e-4)
        for step, loss in enumerate(losses, start=1)
    )


def record(losses: list[float], **changes: object) -> TrainingRecord:
    fields = {"points": points(losses), "steps": len(losses), "tokens": 512 * len(losses), "seconds": 2.0} | changes
    return TrainingRecord.model_validate(fields)


def step(made: TrainingRecord, kind: str = "distill") -> StepLine:
    return StepLine(
        kind=kind, key="k" * 64, cached=False, seconds=1.0, report={"changed": 3, "details": made.details()}
    )


@given(st.lists(st.floats(0, 100), min_size=1, max_size=700), st.integers(1, 90))
def test_a_thinned_curve_is_bounded_and_keeps_the_mean_and_the_end(losses: list[float], most: int) -> None:
    whole = points(losses)
    kept = thinned(whole, most)
    assert 1 <= len(kept) <= most
    assert kept[-1].step == whole[-1].step
    ends = [0, *(each.step for each in kept)]
    sums = sum(each.loss * (end - start) for each, (start, end) in zip(kept, pairwise(ends), strict=True))
    assert sums == pytest.approx(sum(losses), abs=1e-6)


def test_a_short_curve_stays_as_it_is() -> None:
    assert thinned(points([3, 2, 1])) == points([3, 2, 1])


def test_the_sentence_says_what_was_reached_and_what_it_took() -> None:
    made = record(
        [3.0, 2.0],
        judged=[Judged(step=step, tokens=512 * step, loss=loss) for step, loss in enumerate((3.1, 2.2, 2.4))],
        speed=SPEED,
        predicted=MemoryKinds(weights=500_000_000, gradients=400_000_000),
        peak_bytes=1_000_000_000,
        energy_j=2048.0,
        devices=2,
        parallel="fsdp",
    )
    assert training_line(Training("distill", made)) == (
        "distill: loss 3.000 to 2.000, held-out loss 3.100 to 2.200; 2 steps, 1,024 tokens on 2 "
        "devices (fsdp); 12,288 tok/s,"
        " 11.2 TFLOP/s a device (3.0 x forward), MFU 41.2% (HFU 52.9%) of bf16 of a device, its "
        "datasheet; peak memory 1.000 GB,"
        " 900.0 MB predicted (weights 500.0 MB, gradients 400.0 MB); 2.05 kJ, 2,000 mJ a token"
    )


@given(st.lists(st.floats(0, 9), min_size=1, max_size=300), st.integers(1, 40))
def test_of_many_held_out_losses_those_that_the_sentence_says_are_kept(losses: list[float], most: int) -> None:
    whole = [Judged(step=step, tokens=512 * step, loss=loss) for step, loss in enumerate(losses)]
    kept = fewer(whole, most)
    assert len(kept) <= most + 2
    assert (kept[0], kept[-1]) == (whole[0], whole[-1])
    assert record([1.0], judged=kept).kept.loss == min(losses)
    assert list(kept) == sorted(kept, key=lambda each: each.step)


def test_energy_is_not_known_where_several_runs_made_the_steps() -> None:
    course = Course(
        step=2, seconds=1.0, step_seconds=1.0, curve=[3.0, 2.0], rates=[1e-4] * 2, held_out=[{"step": 0, "total": 3.0}]
    )
    shape = ModelShape({"model_type": "llama"}, {})
    trainee = Trainee(shape, 512, "fp32", recomputed=False, adapter_elements=None, teacher=None)
    for resumed, energy in (([], 5.0), ([1], None)):
        made = account(
            TrainingResult(replace(course, resumed=resumed), 1024), trainee, Spent("cpu", 1, 5.0), Ranks(), "ddp", None
        )
        assert made.energy_j == energy


def test_several_processes_on_a_cpu_are_no_share_of_its_rate(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    peak = Device("a CPU", 1e12, {"fp32": 1e12}, 1e9, "measured")
    monkeypatch.setattr("optkit.training.training_report.roof_of", lambda device: peak)
    trainee = Trainee(
        Checkpoint(tiny_model("llama")).shape, 512, "fp32", recomputed=False, adapter_elements=None, teacher=None
    )
    course = Course(
        step=1, seconds=1.0, step_seconds=1.0, curve=[3.0], rates=[1e-4], held_out=[{"step": 0, "total": 3.0}]
    )
    for count in (1, 2):
        ranks = Ranks()
        ranks.count = count
        made = account(TrainingResult(course, 512), trainee, Spent("cpu"), ranks, "ddp", None)
        assert made.speed is not None
        assert (made.speed.mfu is None) == (count == 2)


def test_what_is_not_known_is_not_said() -> None:
    assert training_line(Training("qat", record([3.0, 2.0]))) == "qat: loss 3.000 to 2.000; 2 steps, 1,024 tokens"
    slow = SPEED.model_copy(update={"mfu": None, "hfu": None, "peak": ""})
    said = training_line(Training("qat", record([3.0], speed=slow, predicted=MemoryKinds(weights=5000))))
    assert "MFU" not in said
    assert said.endswith("11.2 TFLOP/s (3.0 x forward); peak memory 5.000 kB predicted (weights 5.000 kB)")


def test_the_scorecard_has_a_section() -> None:
    steps = (step(record([3.0, 2.0])),)
    card = Scorecard(name="a", artifact_key="k" * 64, created="now", recipe={}, steps=steps)
    text = to_markdown(card)
    assert "## Training\n\n- distill: loss 3.000 to 2.000" in text
    plain = StepLine(kind="gptq", key="k" * 64, cached=False, seconds=1.0, report={"changed": 3, "details": {}})
    assert trainings([plain]) == []
    assert "Training" not in to_markdown(card.model_copy(update={"steps": (plain,)}))


def test_a_run_leaves_the_curve_in_the_scorecard(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    fields = {
        "texts": ["python-reference"],
        "tokens": 2048,
        "sequence_length": 64,
        "held_out": 2,
        "learning_rate": 1e-3,
        "patience": None,
    }
    fields |= {"divergence": 0.0, "cross_entropy": 1.0, "precision": "float32", "evaluations": 2}
    recipe = load_recipe({"name": "tiny", "model": str(tiny_model("llama")), "stages": [{"distill": fields}]})
    card = pipeline.run(recipe, out=tmp_path / "out", device="cpu", store=tmp_path / "store")
    (made,) = trainings(card.steps)
    assert [each.tokens for each in made.record.points] == [512, 1024, 1536, 2048]
    assert [each.step for each in made.record.judged] == [0, 2, 4]
    assert made.record.points[-1].learning_rate > 0
    assert made.record.speed is not None
    assert made.record.speed.tokens_per_s > 0
    assert made.record.predicted is not None
    assert (
        made.record.predicted.total
        == pipeline.plan(recipe, device="cpu", store=tmp_path / "new").steps[1].cost.ram_bytes
    )
    assert training_line(made) in (tmp_path / "out" / "scorecard.md").read_text(encoding="utf-8")
    again = pipeline.run(recipe, out=tmp_path / "out", device="cpu", store=tmp_path / "store")
    assert trainings(again.steps)[0].record == made.record
