from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from safetensors.torch import load_file, save_file

from optkit import execute as executing
from optkit.errors import MissingPackageError, ResourceError, StageError
from optkit.execute import execute
from optkit.model.shape import ModelShape
from optkit.model.writer import copy_companions
from optkit.plan import make_plan
from optkit.progress import SilentProgress
from optkit.recipe.recipe import load_recipe
from optkit.stage import Context, Cost, Report, Transform
from optkit.store.store import Store
from tests.conftest import Warnings
from tests.support.changes import changing

RUNS: list[float] = []


class Halve(Transform):
    """Multiply every weight by a factor."""

    factor: float = 0.5

    def run(self, source: Path, target: Path, context: Context) -> Report:
        RUNS.append(self.factor)
        tensors = load_file(source / "model.safetensors")
        save_file({name: tensor * self.factor for name, tensor in tensors.items()}, target / "model.safetensors")
        copy_companions(source, target)
        (target / "config.json").write_bytes((source / "config.json").read_bytes())
        return Report(changed=len(tensors), calibrated_on=({"dataset": "d", "split": "train", "revision": "r"},))

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        return Cost(disk_bytes=shape.size_bytes), shape


class Idle(Halve):
    """Change nothing."""

    def run(self, source: Path, target: Path, context: Context) -> Report:
        super().run(source, target, context)
        return Report(changed=0, skipped={"a": "why"})


class Dies(Halve):
    """Fail on the way."""

    def run(self, source: Path, target: Path, context: Context) -> Report:
        super().run(source, target, context)
        raise MemoryError


class Needs(Halve):
    """Need a package that nobody has."""

    requires: ClassVar[tuple[str, ...]] = ("no-such-package>=2",)


class NeedsNewer(Halve):
    """Need a version that nobody has."""

    requires: ClassVar[tuple[str, ...]] = ("pydantic>=99",)


class Overflows(Halve):
    """Report a loss that is no number."""

    def run(self, source: Path, target: Path, context: Context) -> Report:
        return replace(super().run(source, target, context), details={"losses": {"a": 1.0, "b": [0.5, float("nan")]}})


class Forgets(Halve):
    """Leave no weights."""

    def run(self, source: Path, target: Path, context: Context) -> Report:
        return Report(changed=1)


class Loses(Halve):
    """Leave out a norm, and perhaps say so."""

    said: dict[str, str] = {}

    def run(self, source: Path, target: Path, context: Context) -> Report:
        report = super().run(source, target, context)
        with changing(target) as tensors:
            del tensors["model.norm.weight"]
        return replace(report, dropped=self.said)


class Learns(Halve):
    """Go on where the last run was killed, with the model that the recipe starts from."""

    reads_origin: ClassVar[bool] = True

    def run(self, source: Path, target: Path, context: Context) -> Report:
        assert context.origin is not None
        assert context.workspace is not None
        RUNS.append(float(weight(context.origin)[0] / weight(source)[0]))
        if not context.workspace.exists():
            context.workspace.mkdir(parents=True)
            raise MemoryError
        return super().run(source, target, context)


class Links(Halve):
    """Say whether it may link the files of its source."""

    def run(self, source: Path, target: Path, context: Context) -> Report:
        report = super().run(source, target, context)
        RUNS.append(context.may_link)
        return report


@pytest.fixture(autouse=True)
def stages(monkeypatch):
    RUNS.clear()
    classes = {
        each.__name__.lower(): each
        for each in (Halve, Idle, Dies, Overflows, Needs, NeedsNewer, Forgets, Loses, Learns, Links)
    }
    monkeypatch.setattr("optkit.recipe.registry.STAGES", dict.fromkeys(classes, "here"))
    monkeypatch.setattr("optkit.recipe.registry.stage_class", classes.__getitem__)


@pytest.fixture
def planned(tiny_model, tmp_path):
    store = Store(tmp_path / "store")

    def make(*stages, seed=0):
        recipe = load_recipe({"model": str(tiny_model("llama")), "stages": list(stages), "seed": seed})
        return make_plan(recipe.pinned(None), store, "cpu"), store

    return make


def weight(directory):
    return load_file(directory / "model.safetensors")["model.norm.weight"]


def test_each_step_reads_what_the_one_before_left(planned, tiny_model):
    made = execute(*planned({"halve": {}}, {"halve": {"factor": 0.25}}), Context())
    assert weight(made.weights).equal(weight(tiny_model("llama")) * 0.125)
    assert [(step.kind, step.cached) for step in made.steps] == [("halve", False), ("halve", False)]
    assert made.calibrated_on == ({"dataset": "d", "split": "train", "revision": "r"},)
    assert made.stored is not None
    assert "model.safetensors" in made.stored


def test_a_tensor_that_is_lost_is_an_error_and_one_that_is_dropped_is_told(planned, tiny_model, tmp_path):
    with pytest.raises(StageError, match=r"loses: 1 of 29 tensors of the model are lost: model\.norm\.weight\. They"):
        execute(*planned({"loses": {}}), Context())
    (step,) = execute(*planned({"loses": {"said": {"model.norm": "not needed"}}}), Context()).steps
    assert step.report["dropped"] == {"model.norm": "not needed"}
    assert step.report["notes"] == ["not in what it leaves: model.norm (not needed)"]
    assert step.report["details"]["tensors"] == {"kept": 28, "dropped": 1, "added": 0}


def test_a_second_run_computes_nothing_and_a_common_prefix_is_shared(planned):
    execute(*planned({"halve": {}}, {"halve": {"factor": 0.25}}), Context())
    again = execute(*planned({"halve": {}}, {"halve": {"factor": 0.25}}), Context())
    assert [step.cached for step in again.steps] == [True, True]
    assert RUNS == [0.5, 0.25]
    execute(*planned({"halve": {}}, {"halve": {"factor": 3}}), Context())
    assert RUNS == [0.5, 0.25, 3]


def test_the_memory_that_a_step_needed_stays_with_it_in_the_store(planned):
    (made,) = execute(*planned({"halve": {}}), Context()).steps
    assert made.memory["name"] == "halve"
    assert min(made.memory["resident_bytes"]) > 2**20
    (stored,) = execute(*planned({"halve": {}}), Context()).steps
    assert stored.cached
    assert stored.memory == made.memory


def test_after_a_failure_the_next_run_goes_on_from_the_last_finished_step(planned):
    with pytest.raises(ResourceError, match=r"dies: memory ran out\. Lower the samples"):
        execute(*planned({"halve": {}}, {"dies": {}}), Context())
    execute(*planned({"halve": {}}, {"halve": {"factor": 2}}), Context())
    assert RUNS == [0.5, 0.5, 2]


def test_a_stage_finds_the_first_model_and_what_its_last_run_kept(planned):
    stages = {"halve": {}}, {"halve": {"factor": 0.25}}, {"learns": {}}
    with pytest.raises(ResourceError, match="learns: memory ran out"):
        execute(*planned(*stages), Context())
    execute(*planned(*stages), Context())
    assert RUNS == [0.5, 0.25, 8, 8, 0.5]
    assert not any((planned(*stages)[1].root / "work").iterdir())


def test_what_a_kill_behind_a_finished_step_left_goes(planned):
    execute(*planned({"halve": {}}), Context())
    plan, store = planned({"halve": {}})
    (work := store.workspace(plan.weights_key)).mkdir(parents=True)
    with store.lock(plan.weights_key):  # another run works on it
        execute(plan, store, Context())
        assert work.exists()
    execute(plan, store, Context())
    assert not work.exists()


def test_damage_in_the_store_is_mended_and_said(planned):
    told = Warnings()
    execute(*planned({"halve": {}}), Context(progress=told))
    assert told.lines == []
    plan, store = planned({"halve": {}})
    (store.get(plan.weights_key) / "model.safetensors").write_bytes(b"")
    execute(*planned({"halve": {}}), Context(progress=told))
    assert told.lines == ["halve: its files in the store were changed or lost; they are made again"]
    assert store.get(plan.weights_key) is not None


def test_without_stages_the_model_itself_is_used_where_it_is(planned, tiny_model):
    recipe = load_recipe({"model": str(tiny_model("llama")), "evals": ["footprint"]})
    store = planned({"halve": {}})[1]
    made = execute(make_plan(recipe.pinned(None), store, "cpu"), store, Context())
    assert made.weights == tiny_model("llama")
    assert made.stored is None
    assert made.steps == ()


def test_a_stage_that_changes_nothing_is_an_error_and_is_not_kept(planned):
    plan, store = planned({"idle": {}})
    with pytest.raises(StageError, match=r"idle: the stage changed nothing\. 1 modules were skipped\. Take it out\.$"):
        execute(plan, store, Context())
    assert store.get(plan.weights_key) is None


def test_a_report_without_numbers_is_an_error_that_names_their_place(planned):
    plan, store = planned({"overflows": {}})
    said = r"^overflows: losses: b: 1 is nan\. Weights or activations are so large .* or exclude the layer\.$"
    with pytest.raises(StageError, match=said):
        execute(plan, store, Context())
    assert store.get(plan.weights_key) is None


def test_a_stage_that_leaves_no_model_is_an_error(planned):
    with pytest.raises(Exception, match=r"there is no config.json"):
        execute(*planned({"forgets": {}}), Context())


def test_a_missing_package_is_found_before_anything_runs(planned):
    with pytest.raises(
        MissingPackageError, match=r"needs: the package `no-such-package>=2` is not.*pip install 'no-such-package>=2'"
    ):
        execute(*planned({"halve": {}}, {"needs": {}}), Context())
    with pytest.raises(MissingPackageError, match="pydantic>=99"):
        execute(*planned({"needsnewer": {}}), Context())
    assert RUNS == []


def test_a_disk_too_small_is_found_before_anything_runs(planned, monkeypatch):
    plan, store = planned({"halve": {}})
    monkeypatch.setattr(executing.shutil, "disk_usage", lambda place: type("Usage", (), {"free": 10})())
    with pytest.raises(ResourceError, match=r"the steps will write \d{3} kB and 10 B are free\. Free some space"):
        execute(plan, store, Context())
    assert RUNS == []


def test_only_what_a_stage_left_in_the_store_may_be_linked(planned):
    plan, store = planned({"links": {"factor": 0.5}}, {"links": {"factor": 0.25}})
    execution = execute(plan, store, Context())
    assert RUNS == [0.5, False, 0.25, True]
    assert execution.stored == store.record(plan.weights_key)["files"]


def test_a_model_that_was_linked_into_the_store_is_not_linked_on_into_the_artifact(planned, tiny_model, monkeypatch):
    def link(_model, target, _progress):
        for path in tiny_model("llama").iterdir():
            (target / path.name).hardlink_to(path)
        return {}

    monkeypatch.setattr(executing, "locate_model", lambda _model: None)
    monkeypatch.setattr(executing, "import_model", link)
    plan, store = planned("halve")
    plan = plan.model_copy(update={"steps": plan.steps[:1]})
    execution = execute(plan, store, Context())
    assert execution.weights == store.get(plan.weights_key)
    assert execution.stored is None


def test_a_step_is_called_kept_only_when_it_is(planned):
    plan, store = planned("halve")
    found = []

    class Hears(SilentProgress):
        def say(self, line):
            found.append((line, store.get(plan.weights_key) is not None))

    execute(plan, store, Context(progress=Hears()))
    execute(plan, store, Context(progress=Hears()))
    assert found == [("halve: kept in the store", True)]
