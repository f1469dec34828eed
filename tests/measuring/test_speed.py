"""Speed told apart: which further models are timed, and what the scorecard says of them."""

from pathlib import Path
from typing import Any

import pytest

import optkit
from optkit.errors import EvalError, ResourceError, StageError
from optkit.kernels.cpu.native import why_not_native
from optkit.measuring.evaluation import context_of, measure_plan
from optkit.measuring.speed import SpeedRungs, speed_rungs
from optkit.pipeline import plan
from optkit.progress import SilentProgress
from optkit.recipe.gates import parse_gate
from optkit.scorecard import Scorecard, read_json, table_rows, to_json, to_markdown, waterfall
from optkit.settings.cpu_decoder import CpuDecoder
from optkit.store.store import Store
from tests.conftest import TinyModel
from tests.support.quick_evals import THROUGHPUT

QUICK = {"throughput": {**THROUGHPUT["throughput"], "processes": 2}}
RTN: dict[str, object] = {"rtn": {"bits": 4, "group_size": 16}}
PRUNE: dict[str, object] = {"prune": {"sparsity": 0.5, "method": "magnitude"}}
needs_kernels = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))


def recipe(model: Path, stages: list[object], evals: list[object] | None = None, **more: object) -> dict[str, Any]:
    return {"name": "tiny", "model": {"name": str(model)}, "stages": stages, "evals": evals or [QUICK], **more}


def rungs(tmp_path: Path, device: str = "cpu", stages_too: bool = True, **asked: Any) -> SpeedRungs:
    made = plan(optkit.load_recipe(recipe(**asked)), store=tmp_path / "store").model_copy(update={"device": device})
    return speed_rungs(made, stages=stages_too)


def names(found: SpeedRungs) -> list[tuple[str, int, list[str]]]:
    return [(rung.name, rung.index, [entry.kind for entry in rung.settings]) for rung in found.rungs]


def test_packed_weights_on_a_cpu_have_an_engine_of_their_own(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    found = rungs(tmp_path, model=model, stages=[RTN])
    assert names(found) == [("same engine", 0, ["cpu_decoder"])]
    assert (found.engine_is_shared, found.kernels_assumed) == (False, True)
    found = rungs(tmp_path, model=model, stages=[RTN, {"attention": "eager"}])
    assert names(found) == [("engine", 0, ["cpu_decoder"]), ("same engine", 0, ["attention", "cpu_decoder"])]
    found = rungs(tmp_path, model=model, stages=[RTN, {"attention": "sdpa"}, {"compile": {"devices": ["cuda"]}}])
    assert [rung.name for rung in found.rungs] == ["same engine"]
    found = rungs(tmp_path, model=model, stages=[PRUNE, RTN])
    assert names(found) == [("same engine", 0, ["cpu_decoder"]), ("prune", 1, ["cpu_decoder"])]
    assert len(set(found.keys)) == 2
    assert names(rungs(tmp_path, model=model, stages=[PRUNE, RTN], stages_too=False)) == names(found)[:1]


def test_what_has_the_engine_of_the_unmodified_model_costs_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    for nothing in (
        {"model": model, "stages": [{"cast": {"dtype": "bfloat16"}}, {"attention": "sdpa"}]},
        {"model": model, "stages": [RTN], "evals": ["footprint"]},
        {"model": model, "stages": [RTN], "attribution": False},
        {"model": tiny_model("gemma"), "stages": [RTN]},
        {"model": model, "stages": []},
        {"model": model, "stages": [RTN], "device": "cuda"},
    ):
        assert rungs(tmp_path, **nothing).rungs == ()  # type: ignore[arg-type]
    asked = rungs(
        tmp_path, model=model, stages=[RTN], attribution=False, gates={"decode_tokens_per_s": ">= 1x same engine"}
    )
    assert [rung.name for rung in asked.rungs] == ["same engine"]


def test_settings_that_decode(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optkit.keys.device_name", lambda device: device)
    stages: list[object] = [{"cast": {"dtype": "bfloat16"}}, {"attention": "eager"}, "cuda_graphs"]
    found = rungs(tmp_path, device="cuda", model=tiny_model("llama"), stages=stages)
    assert names(found) == [("engine", 0, ["cuda_graphs"]), ("same engine", 0, ["attention", "cuda_graphs"])]
    assert not found.kernels_assumed
    only = rungs(tmp_path, device="cuda", model=tiny_model("llama"), stages=["cuda_graphs"])
    assert only.rungs == ()  # the artifact is the unmodified model in its engine


def test_an_export_is_the_same_engine_if_it_is_of_the_model_itself(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, rounded = tiny_model("llama"), {"onnx_quantize": {"bits": 4}}
    provider: object = {"onnx_provider": {"threads": 1}}
    found = rungs(tmp_path, model=model, stages=["onnx", rounded, provider])
    assert names(found) == [("same engine", 1, ["onnx_provider"])]
    for stages in (["onnx"], [RTN, "onnx"]):
        found = rungs(tmp_path, model=model, stages=stages)
        assert "same engine" not in [rung.name for rung in found.rungs]
        assert not found.engine_is_shared


def ran(tmp_path: Path, asked: dict[str, Any]) -> Scorecard:
    return optkit.run(asked, out=tmp_path / "out", store=tmp_path / "store", device="cpu")


@needs_kernels
def test_the_scorecard_tells_engine_and_stages_apart(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = {"decode_tokens_per_s": ">= 0.001x same engine", "prefill_tokens_per_s": ">= 1000x of same engine"}
    asked = recipe(tiny_model("llama"), [PRUNE, RTN], gates=gates)
    scorecard = ran(tmp_path, asked)
    assert [rung.stage for rung in scorecard.speed] == ["unmodified", "same engine", "prune", "rtn"]
    assert all({each.unit for each in rung.metrics} == {"tokens/s"} for rung in scorecard.speed)
    rows = {row.metric.name: row for row in scorecard.rows}
    (beside,) = rows["decode_tokens_per_s"].beside
    assert beside.of == "same engine"
    assert beside.metric == scorecard.speed[1].metrics[1]
    assert beside.ratio == pytest.approx(rows["decode_tokens_per_s"].metric.value / beside.metric.value)
    for name, limit in gates.items():
        ratio = rows[name].number("same engine")
        assert ratio is not None
        assert rows[name].gates[0].verdict is parse_gate(name, limit).judge(ratio)
    table = waterfall(scorecard.speed)
    assert table is not None
    assert table.columns[0] == "after"
    assert [row[0] for row in table.rows] == ["unmodified", "same engine", "prune", "rtn"]
    assert all(row[2].endswith("]") for row in table.rows[1:])
    text = to_markdown(scorecard)
    assert "## Where the speed comes from" in text
    told = [row for row in table_rows(scorecard) if row.of == "same engine"]
    assert [row.metric.partition(",")[0] for row in told] == ["prefill_tokens_per_s", "decode_tokens_per_s"]
    assert " of same engine [1] | " in text
    (tmp_path / "scorecard.json").write_text(to_json(scorecard))
    assert read_json(tmp_path / "scorecard.json") == scorecard

    monkeypatch.setattr("optkit.session.open_session", lambda *_, **__: pytest.fail("a model was opened"))
    assert ran(tmp_path, asked).speed == scorecard.speed


@needs_kernels
@pytest.mark.parametrize("error", [StageError("cannot be so", where="cpu_decoder"), ResourceError("memory ran out")])
def test_a_further_model_that_fails_is_left_out(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    opened = []

    def failing(_setting: CpuDecoder, _session: object) -> None:
        opened.append(1)
        raise error

    monkeypatch.setattr(CpuDecoder, "on_open", failing)
    asked = recipe(tiny_model("llama"), [RTN], gates={"decode_tokens_per_s": ">= 1x same engine"})
    scorecard = ran(tmp_path, asked)
    assert scorecard.speed == ()
    (gate,) = [gate for row in scorecard.rows for gate in row.gates]
    assert gate.verdict == "FAIL"
    assert gate.why.startswith("no ratio: it was not measured on the unmodified model in the artifact's engine; set a")
    ran(tmp_path, asked)
    assert len(opened) == (1 if isinstance(error, StageError) else 2)


def test_kernels_that_the_artifact_does_not_use_are_not_compared_with(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optkit.session.torch_opening.step_decoder", lambda _model: (None, []))
    scorecard = ran(tmp_path, recipe(tiny_model("llama"), [RTN]))
    assert scorecard.speed == ()
    assert all(row.beside == () for row in scorecard.rows)


def test_a_plan_that_is_measured_without_further_models_judges_by_none(tiny_model: TinyModel, tmp_path: Path) -> None:
    asked = recipe(tiny_model("llama"), [RTN], attribution=False)
    ran(tmp_path, asked)
    gated = {**asked, "gates": {"decode_tokens_per_s": ">= 1x same engine"}}
    made, store = plan(optkit.load_recipe(gated), store=tmp_path / "store"), Store(tmp_path / "store")
    scorecard, _ = measure_plan(made, store, context_of(made, SilentProgress(), None), tmp_path / "out", alone=False)
    (gate,) = [gate for row in scorecard.rows for gate in row.gates]
    assert gate.why.startswith("no ratio: it was not measured on the unmodified model in the artifact's engine")


def test_nothing_is_its_own_engine(tiny_model: TinyModel, tmp_path: Path) -> None:
    asked = recipe(tiny_model("llama"), [], gates={"decode_tokens_per_s": ">= 1x same engine"})
    with pytest.raises(EvalError, match="gate decode_tokens_per_s: the limit is relative to the baseline. Nothing was"):
        ran(tmp_path, asked)


def test_the_baseline_is_the_same_engine_if_nothing_differs(tiny_model: TinyModel, tmp_path: Path) -> None:
    gates = {"decode_tokens_per_s": ">= 0.001x same engine"}
    scorecard = ran(tmp_path, recipe(tiny_model("llama"), [{"cast": {"dtype": "bfloat16"}}], gates=gates))
    (row,) = [row for row in scorecard.rows if row.gates]
    assert row.gates[0].why == ""
    assert row.number("same engine") == row.number("baseline")
    assert row.beside[0].metric == row.baseline
    assert scorecard.speed == ()
