import json
import struct
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from optkit import keys as keys_module
from optkit import plan as plan_module
from optkit.common.frozen import Frozen
from optkit.errors import EvalError, RecipeError, SourceError, StageError
from optkit.measure import Eval
from optkit.model.shape import ModelShape, TensorInfo
from optkit.pipeline import run
from optkit.plan import Plan, make_plan
from optkit.recipe import registry
from optkit.recipe.recipe import EvalEntry, Recipe, SettingEntry, TransformEntry, load_recipe
from optkit.settings.precision import Precision
from optkit.source.models import ModelSource
from optkit.stage import Cost, Format, Setting, Transform
from optkit.stages.cast import Cast
from optkit.store.store import Store
from tests.conftest import TinyModel, Warnings


class Halve(Transform):
    """Halves the first dimension of every tensor."""

    by: int = 2

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        tensors = {
            name: TensorInfo(info.dtype, (info.shape[0] // self.by, *info.shape[1:]))
            for name, info in shape.tensors.items()
        }
        left = ModelShape(shape.config, tensors)
        return Cost(
            disk_bytes=left.size_bytes, ram_bytes=shape.size_bytes, gpu_bytes=shape.size_bytes * (device != "cpu")
        ), left


class Shrink(Halve):
    """The same, packed."""

    produces: ClassVar[Format] = Format.QUANTIZED


class Tone(Setting):
    """Sets a tone."""

    key: str = "major"


class Score(Eval):
    """Scores."""

    window: int = 16

    def longest_sequence(self) -> int:
        return self.window


class Distance(Eval):
    """Compares."""

    compares: ClassVar[bool] = True


class Speed(Eval):
    """Times."""

    timed: ClassVar[bool] = True


class Race(Eval):
    """Times both together."""

    compares: ClassVar[bool] = True
    timed: ClassVar[bool] = True


def write_model(directory: Path, **config: Any) -> Path:
    """Write a checkpoint with one block of 64 x 64 and an embedding of 32 x 64 float32 zeros."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **config}), encoding="utf-8")
    shapes = {"model.embed_tokens.weight": (32, 64), "model.layers.0.mlp.up_proj.weight": (64, 64)}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return directory


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def model(tmp_path: Path) -> ModelSource:
    return ModelSource(name=str(write_model(tmp_path / "model")), revision="sha256:" + "a" * 64)


def recipe(model: ModelSource, *stages: Transform | Setting, evals: tuple[Eval, ...] = (), seed: int = 0) -> Recipe:
    def kind(value: Frozen) -> str:
        return type(value).__name__.lower()

    return Recipe(
        name="r",
        model=model,
        stages=tuple(
            TransformEntry(kind=kind(stage), value=stage)
            if isinstance(stage, Transform)
            else SettingEntry(kind=kind(stage), value=stage)
            for stage in stages
        ),
        evals=tuple(EvalEntry(kind=kind(each), value=each) for each in evals),
        seed=seed,
    )


def finish(store: Store, key: str) -> None:
    with store.write(key) as draft:
        (draft.model / "config.json").write_text("{}", encoding="utf-8")


def eval_keys(plan: Plan) -> dict[str, tuple[str, str | None]]:
    return {each.kind: (each.key, each.baseline_key) for each in plan.evals}


def test_shapes_and_costs_are_chained(model: ModelSource, store: Store) -> None:
    size = 4 * 64 * (32 + 64)
    plan = make_plan(recipe(model, Halve(), Tone(), Shrink(by=4)), store, "cpu")
    assert [(step.kind, step.format, step.size_bytes, step.hit) for step in plan.steps] == [
        ("model", Format.CHECKPOINT, size, True),
        ("halve", Format.CHECKPOINT, size // 2, False),
        ("shrink", Format.QUANTIZED, size // 8, False),
    ]
    assert [step.source_key for step in plan.steps] == [None, plan.steps[0].key, plan.steps[1].key]
    assert plan.steps[0].directory == Path(model.name)
    assert (plan.disk_bytes, plan.ram_bytes, plan.gpu_bytes) == (size // 2 + size // 8, size, 0)
    assert make_plan(recipe(model, Halve()), store, "cuda").gpu_bytes == size
    assert plan.weights_key == plan.steps[2].key
    assert json.loads(plan.model_dump_json())["steps"][2]["stage"] == {"by": 4}


def test_what_the_store_holds_is_a_hit(model: ModelSource, store: Store) -> None:
    asked = recipe(model, Halve(), Shrink())
    first = make_plan(asked, store, "cpu")
    assert [step.kind for step in first.pending] == ["halve", "shrink"]
    finish(store, first.steps[1].key)
    second = make_plan(asked, store, "cpu")
    assert [step.hit for step in second.steps] == [True, True, False]
    assert second.steps[1].directory == store.get(first.steps[1].key)
    assert [step.kind for step in second.pending] == ["shrink"]
    assert second.disk_bytes == second.steps[2].cost.disk_bytes


def test_what_cannot_be_computed_is_refused_before_anything_is_made(tmp_path: Path, store: Store) -> None:
    source = ModelSource(name=str(write_model(tmp_path / "xlnet", model_type="xlnet")), revision="sha256:" + "a" * 64)
    for stage, where in ((Cast(dtype="bfloat16"), "cast"), (Precision(mode="fp16"), "model")):
        assert make_plan(recipe(source, stage), store, "cpu")
        said = rf"^{where}: the model's code in transformers cannot compute in \w*16\. .* Leave the weights in float32"
        with pytest.raises(SourceError, match=said):
            make_plan(recipe(source, stage, evals=(Score(),)), store, "cpu")


def test_a_later_hit_makes_the_steps_before_it_needless(model: ModelSource, store: Store) -> None:
    asked = recipe(model, Halve(), Shrink())
    finish(store, make_plan(asked, store, "cpu").steps[2].key)
    plan = make_plan(asked, store, "cpu")
    assert [step.hit for step in plan.steps] == [True, False, True]
    assert plan.pending == ()
    assert plan.disk_bytes == plan.ram_bytes == 0


def test_a_model_that_is_not_there_yet_is_imported(
    model: ModelSource, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = ModelShape({}, {"model.layers.0.w": TensorInfo("F32", (8, 8)), "model.norm.w": TensorInfo("F32", (8,))})
    monkeypatch.setattr(plan_module, "locate_model", lambda pinned: None)
    monkeypatch.setattr(plan_module, "model_shape", lambda pinned, imported: shape)
    plan = make_plan(recipe(model, Halve()), store, "cpu")
    assert [step.kind for step in plan.pending] == ["model", "halve"]
    assert plan.steps[0].cost == Cost(disk_bytes=288, ram_bytes=288)
    finish(store, plan.steps[0].key)
    again = make_plan(recipe(model, Halve()), store, "cpu")
    assert again.steps[0].hit
    assert again.steps[0].directory == store.get(plan.steps[0].key)


def test_recipes_with_a_common_prefix_share_it(model: ModelSource, store: Store) -> None:
    one = make_plan(recipe(model, Halve(), Shrink()), store, "cpu")
    other = make_plan(recipe(model, Halve(), Tone(), Shrink(by=4)), store, "cpu")
    assert [a.key == b.key for a, b in zip(one.steps, other.steps, strict=True)] == [True, True, False]
    assert make_plan(recipe(model, Halve(), seed=1), store, "cpu").steps[1].key != one.steps[1].key


def test_a_changed_setting_changes_no_step(model: ModelSource, store: Store) -> None:
    major, minor = (
        make_plan(recipe(model, Shrink(), Tone(key=key), evals=(Score(),)), store, "cpu") for key in ("major", "minor")
    )
    assert [step.key for step in major.steps] == [step.key for step in minor.steps]
    assert major.weights_key == minor.weights_key
    assert major.artifact_key != minor.artifact_key
    assert major.evals[0].key != minor.evals[0].key
    assert major.evals[0].baseline_key == minor.evals[0].baseline_key


def test_a_recipe_that_changes_nothing_is_its_own_baseline(model: ModelSource, store: Store) -> None:
    plan = make_plan(recipe(model, evals=(Score(), Speed())), store, "cpu")
    assert plan.artifact_key == plan.baseline_key
    assert plan.weights_key == plan.steps[0].key
    assert all(each.key == each.baseline_key for each in plan.evals)
    assert make_plan(recipe(model, Tone()), store, "cpu").artifact_key != plan.baseline_key


def test_only_comparing_evals_depend_on_the_baseline(tmp_path: Path, model: ModelSource, store: Store) -> None:
    plan = make_plan(recipe(model, Shrink(), evals=(Score(), Distance())), store, "cpu")
    score, distance = plan.evals
    assert score.baseline_key is not None
    assert distance.baseline_key is None
    assert distance.baseline_hit
    assert keys_module.make_metric_key(EvalEntry(kind="score", value=Score()), 0, plan.weights_key, []) == score.key
    assert (
        keys_module.make_metric_key(EvalEntry(kind="distance", value=Distance()), 0, plan.weights_key, [])
        != distance.key
    )


def test_timings_depend_on_the_machine_and_on_what_was_timed_beside(
    model: ModelSource, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys(*stages: Transform | Setting) -> dict[str, tuple[str, str | None]]:
        return eval_keys(make_plan(recipe(model, *stages, evals=(Score(), Speed(), Race())), store, "cpu"))

    here = keys(Shrink())
    assert keys(Shrink(), Tone())["speed"][1] != here["speed"][1]
    assert keys(Shrink(), Tone())["score"][1] == here["score"][1]
    for name, other in (
        ("device_name", lambda device: "another"),
        ("cpu_cores", lambda: 4096),
        ("package_version", lambda name: "9.9"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(keys_module, name, other)
            there = keys(Shrink())
        assert there["score"] == here["score"]
        assert there["speed"][0] != here["speed"][0]
        assert there["speed"][1] != here["speed"][1]
        assert there["race"][0] != here["race"][0]


def test_a_timing_is_a_hit_only_together_with_the_one_beside_it(model: ModelSource, store: Store) -> None:
    asked = recipe(model, Shrink(), evals=(Score(), Speed()))
    first = make_plan(asked, store, "cpu")
    assert not any(each.hit or each.baseline_hit for each in first.evals)
    for each in first.evals:
        store.put_json(each.key, {"metrics": []})
    score, speed = make_plan(asked, store, "cpu").evals
    assert (score.hit, score.baseline_hit) == (True, False)
    assert (speed.hit, speed.baseline_hit) == (False, False)
    store.put_json(str(speed.baseline_key), {"metrics": []})
    assert (make_plan(asked, store, "cpu").evals[1].hit, make_plan(asked, store, "cpu").evals[1].baseline_hit) == (
        True,
        True,
    )


def test_a_quantized_model_cannot_be_quantized_again(tmp_path: Path, store: Store) -> None:
    packed = ModelSource(
        name=str(write_model(tmp_path / "packed", quantization_config={"bits": 4})), revision="sha256:" + "b" * 64
    )
    assert make_plan(recipe(packed, Tone()), store, "cpu").steps[0].format is Format.QUANTIZED
    with pytest.raises(StageError) as caught:
        make_plan(recipe(packed, Shrink()), store, "cpu")
    assert str(caught.value) == (
        f"recipe r: shrink reads a checkpoint with float weights and {packed.name} is one with packed weights. "
        "Start from the model's float weights."
    )


def test_a_recipe_made_in_python_keeps_the_rules_of_one_from_text(
    model: ModelSource, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = {"shrink": Shrink, "halve": Halve, "tone": Tone}
    for kind, each in stages.items():
        monkeypatch.setitem(registry.STAGES, kind, f"{__name__}:{each.__name__}")
    for kinds in (["shrink", "halve"], ["shrink", "shrink"], ["tone", "halve", "tone"]):
        with pytest.raises(RecipeError) as told:
            load_recipe({"model": model.name, "stages": kinds})
        with pytest.raises(StageError) as raised:
            make_plan(recipe(model, *(stages[kind]() for kind in kinds)), store, "cpu")
        (problem,) = told.value.problems
        assert raised.value.what == problem.message.replace(", first in the recipe", "")


@pytest.mark.parametrize(
    "config", [{"max_position_embeddings": 15}, {"n_positions": 15}, {"text_config": {"max_position_embeddings": 15}}]
)
def test_a_sequence_longer_than_the_model_is_refused(config: dict[str, Any], tmp_path: Path, store: Store) -> None:
    short = ModelSource(name=str(write_model(tmp_path / "model", **config)), revision="sha256:" + "a" * 64)
    message = (
        rf"^recipe r: the sequences of score have 16 tokens, and {short.name} was built for 15\. .*Set its fields "
        r"so that they have at most 15\.$"
    )
    with pytest.raises(EvalError, match=message):
        make_plan(recipe(short, Halve(), evals=(Speed(), Score())), store, "cpu")
    assert make_plan(recipe(short, Halve(), evals=(Speed(), Score(window=15))), store, "cpu").evals


def test_timings_with_other_threads_are_other_timings(tiny_model, tmp_path):
    recipe = load_recipe(
        {"model": str(tiny_model("llama")), "evals": [{"throughput": {"prompts": [8], "new_tokens": 4}}, "footprint"]}
    ).pinned(None)
    threads, keys = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            keys.append([each.key for each in make_plan(recipe, Store(tmp_path), "cpu").evals])
    finally:
        torch.set_num_threads(threads)
    assert [one == two for one, two in zip(*keys, strict=True)] == [False, True]


def test_a_run_says_first_which_gate_cannot_pass_and_goes_on(tiny_model: TinyModel, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    text = (
        f"model: {tiny_model('llama')}\nstages: [rtn: {{bits: 8}}]\nevals: [footprint]\ngates: "
        f"{{size_bytes: '<= 0.1x'}}\n"
    )
    recipe.write_text(text, encoding="utf-8")
    said = Warnings()
    scorecard = run(recipe, device="cpu", store=tmp_path / "store", out=tmp_path / "out", progress=said)
    assert said.lines[0].startswith("gate size_bytes <= 0.1x cannot pass: the stages leave about 0.")
    assert scorecard.exit_status == 3
