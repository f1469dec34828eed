"""What a plan says of time: what such work took on this machine, in proportion, and nothing if
it was never done here.
"""

import json
from pathlib import Path

import pytest
from optkit_evals.perplexity import Perplexity

from optkit.pipeline import plan, run
from optkit.stages.auto_bits import AutoBits
from optkit.stages.gptq import Gptq
from optkit.stages.mx import Mx
from optkit.stages.rtn import Rtn
from optkit.store.durations import FILE, Durations
from tests.conftest import TinyModel


def gptq(samples: int, **fields: object) -> Gptq:
    return Gptq.model_validate({"calibration": {"dataset": "c4", "samples": samples, "sequence_length": 512}, **fields})


@pytest.fixture
def durations(tmp_path: Path) -> Durations:
    return Durations(tmp_path, "cpu")


def test_what_was_never_done_here_is_not_known(durations: Durations) -> None:
    assert durations.predict("gptq", gptq(128), 10**9) is None
    durations.note("gptq", gptq(128), 10**9, 60.0)
    assert durations.predict("rtn", Rtn(), 10**9) is None
    assert durations.predict("gptq", gptq(128, learn="blocks"), 10**9) is None
    assert durations.predict("gptq", gptq(128, effort="balanced"), 10**9) is None
    assert durations.predict("gptq", gptq(128, devices=2), 10**9) is None


def test_a_comparison_that_is_left_out_and_another_method_take_another_time(durations: Durations) -> None:
    durations.note("auto_bits", AutoBits(average_bits=5), 10**9, 60.0)
    assert durations.predict("auto_bits", AutoBits(average_bits=6), 10**9) == pytest.approx(60)
    assert durations.predict("auto_bits", AutoBits(average_bits=5, held_out_samples=0), 10**9) is None
    assert durations.predict("auto_bits", AutoBits(average_bits=5, method="rtn"), 10**9) is None


def test_a_stage_that_reads_no_text_says_nothing_of_one_that_does(durations: Durations) -> None:
    text = {"calibration": {"dataset": "c4", "samples": 128, "sequence_length": 512}}
    durations.note("mx", Mx(), 10**6, 0.5)
    assert durations.predict("mx", Mx(type="mxfp4"), 10**6) == pytest.approx(0.5)
    assert durations.predict("mx", Mx.model_validate({"rounding": "gptq", **text}), 10**6) is None
    durations.note("gptq", gptq(128, learn="blocks", learning_steps=3), 10**9, 9.0)
    assert durations.predict("gptq", gptq(128, learn="blocks"), 10**9) is None
    durations.note("gptq", gptq(128, learn="blocks", copies=0), 10**9, 90.0)
    assert durations.predict("gptq", gptq(128, learn="blocks"), 10**9) is None


def test_time_goes_with_weights_and_text(durations: Durations) -> None:
    durations.note("gptq", gptq(128), 10**9, 60.0)
    assert durations.predict("gptq", gptq(128), 10**9) == pytest.approx(60)
    assert durations.predict("gptq", gptq(64), 4 * 10**9) == pytest.approx(120)


def test_a_tiny_model_says_nothing_of_a_large_one(durations: Durations) -> None:
    """Its second is the start of a process, which a large one does not take a thousand times."""
    durations.note("gptq", gptq(128), 10**6, 1.0)
    assert durations.predict("gptq", gptq(128), 10**9) is None
    assert durations.predict("gptq", gptq(128), 10**8) == pytest.approx(100)
    durations.note("gptq", gptq(128, bits=8), 10**9, 60.0)
    assert durations.predict("gptq", gptq(128), 10**9) == pytest.approx(60)


def test_runs_with_the_same_fields_go_before_others(durations: Durations) -> None:
    durations.note("gptq", gptq(128, bits=8), 10**9, 600.0)
    assert durations.predict("gptq", gptq(128), 10**9) == pytest.approx(600)
    durations.note("gptq", gptq(128), 10**9, 60.0)
    assert durations.predict("gptq", gptq(32), 10**9) == pytest.approx(15)


def test_a_text_that_is_read_to_its_end_says_nothing_of_a_part(durations: Durations) -> None:
    whole, part = Perplexity(dataset="wikitext2"), Perplexity(dataset="wikitext2", windows=4)
    durations.note("perplexity", whole, 10**9, 100.0)
    assert durations.predict("perplexity", whole, 2 * 10**9) == pytest.approx(200)
    assert durations.predict("perplexity", part, 10**9) is None
    assert durations.predict("perplexity", Perplexity(dataset="c4"), 10**9) is None


def test_another_number_of_threads_is_another_machine(
    durations: Durations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durations.note("rtn", Rtn(), 10**9, 5.0)
    monkeypatch.setattr("optkit.store.durations.cpu_threads", lambda: 99)
    assert Durations(tmp_path, "cpu").predict("rtn", Rtn(), 10**9) is None


def test_lines_that_are_damaged_are_left_out(durations: Durations, tmp_path: Path) -> None:
    durations.note("rtn", Rtn(), 10**9, 5.0)
    with (tmp_path / FILE).open("a") as file:
        file.write(
            '{"what": "rtn"}\n[]\n7\n{"what": "rtn", "fields": 3, "machine": [], "size_bytes": 1, '
            '"seconds": 1}\n{"what": "rt'
        )
    assert durations.predict("rtn", Rtn(), 10**9) == pytest.approx(5)


def test_a_plan_says_what_its_run_will_take(tiny_model: TinyModel, tmp_path: Path) -> None:
    measured = {"perplexity": {"dataset": "python-reference", "window": 32, "windows": 2}}
    recipe = {"model": str(tiny_model("llama")), "stages": ["rtn"], "evals": [measured]}
    text = tmp_path / "r.yaml"
    text.write_text(json.dumps(recipe))
    before = plan(text, device="cpu", store=tmp_path / "store")
    assert [before.steps[1].seconds, before.evals[0].seconds] == [None, None]
    run(text, device="cpu", store=tmp_path / "store", out=tmp_path / "out")
    again = plan(text, device="cpu", store=tmp_path / "store", overrides=["stages.0.rtn.bits=8"])
    assert again.steps[1].seconds is not None
    assert again.steps[1].seconds > 0
    assert again.evals[0].seconds is not None


def test_requests_take_the_time_in_which_they_arrive(tiny_model: TinyModel, tmp_path: Path) -> None:
    text, load = tmp_path / "r.yaml", {"rates": [0.5, 2], "requests": 8, "repeats": 3, "prompt": 8, "new_tokens": 4}
    text.write_text(json.dumps({"model": str(tiny_model("llama")), "stages": ["rtn"], "evals": [{"load": load}]}))
    found = plan(text, device="cpu", store=tmp_path)
    arriving_s = 3 * (8 / 0.5 + 8 / 2)
    assert found.evals[0].seconds == 2 * arriving_s
    Durations(tmp_path, "cpu").note("load of the artifact", found.evals[0].eval, found.steps[0].size_bytes, 100.0)
    assert plan(text, device="cpu", store=tmp_path).evals[0].seconds == pytest.approx(100 + arriving_s)
