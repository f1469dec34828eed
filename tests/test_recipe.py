# ruff: noqa: E501
from __future__ import annotations

import io
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import Field
from ruamel.yaml import YAML

from optkit import recipe as recipe_module
from optkit import registry
from optkit.errors import OptkitError, RecipeError
from optkit.frozen import Frozen
from optkit.measure import Eval
from optkit.recipe import Recipe, load_recipe
from optkit.source.calibration import Calibration
from optkit.source.models import ModelSource
from optkit.source.texts import TextSource
from optkit.stage import Format, Setting, Transform


class Pruned(Frozen):
    pattern: str
    revision: str | None = None

    def pinned(self, data: Path | None) -> Pruned:
        return self.model_copy(update={"revision": f"pinned in {data}"})


class Shrink(Transform):
    """Makes weights small."""

    produces: ClassVar[Format] = Format.QUANTIZED

    bits: Literal[2, 3, 4, 8] = 4
    """Bits of a weight."""
    group_size: int | Literal["channel"] = 64
    damping: float = Field(default=0.01, gt=0, le=1)
    symmetric: bool = True
    include: tuple[str, ...] = ()
    prune: tuple[Pruned, ...] = ()
    calibration: Calibration = Calibration(dataset="python-reference")


class Halve(Transform):
    """Makes weights half."""

    by: int = 2

    def model_post_init(self, context: object) -> None:
        if self.by == 13:
            raise OptkitError("thirteen is not allowed", where="halve")


class Tone(Setting):
    """Sets a tone."""

    shorthand: ClassVar[str] = "key"

    key: Literal["major", "minor"]
    loud: bool = False


class Score(TextSource, Eval):
    """Scores a text."""

    metrics: ClassVar[tuple[str, ...]] = ("score",)

    window: int = 16


class Speed(Eval):
    """Times."""

    metrics: ClassVar[tuple[str, ...]] = ("tokens_per_s",)

    batch_sizes: tuple[int, ...] = (1,)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for known, classes in ((registry.STAGES, (Shrink, Halve, Tone)), (registry.EVALS, (Score, Speed))):
        for kind in list(known):
            monkeypatch.delitem(known, kind)
        for each in classes:
            monkeypatch.setitem(known, each.__name__.lower(), f"{__name__}:{each.__name__}")
    for kind in list(registry.PRESETS):
        monkeypatch.delitem(registry.PRESETS, kind)
    monkeypatch.setitem(registry.PRESETS, "major", {"tone": {"key": "major"}})


GOOD = """\
model: smollm2-135m
stages:
  - shrink: {bits: 8, damping: 1e-5, calibration: {dataset: python-reference, samples: 4}}
  - tone: minor
evals:
  - score: {dataset: python-reference, split: test}
  - speed
gates:
  score: "<= 1.10x"
"""


def problems_of(text: str | dict[str, object], overrides: tuple[str, ...] = (), model: str | None = None) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(text, overrides, model)
    return [str(problem) for problem in caught.value.problems]


def one_problem(text: str, *overrides: str) -> str:
    (problem,) = problems_of(text, overrides)
    return problem


def test_a_recipe_says_what_its_yaml_says() -> None:
    recipe = load_recipe(GOOD)
    assert recipe.model == ModelSource(name="smollm2-135m")
    assert [entry.kind for entry in recipe.stages] == ["shrink", "tone"]
    assert [entry.value for entry in recipe.transforms] == [
        Shrink(bits=8, damping=1e-5, calibration=Calibration(dataset="python-reference", samples=4))
    ]
    assert [entry.value for entry in recipe.settings] == [Tone(key="minor")]
    assert [entry.value for entry in recipe.evals] == [Score(dataset="python-reference", split="test"), Speed()]
    assert recipe.gates == {"score": "<= 1.10x"}
    assert (recipe.seed, recipe.description, recipe.name) == (0, "", "recipe")


def test_short_forms_are_the_long_forms() -> None:
    long = {"model": {"name": "m/m"}, "stages": [{"halve": {}}, {"tone": {"key": "major"}}], "evals": [{"speed": {}}]}
    for stages in (["halve", "major"], [{"halve": None}, {"tone": "major"}]):
        assert load_recipe({"model": "m/m", "stages": stages, "evals": ["speed"]}) == load_recipe(long)


def test_the_name_is_the_file_name_where_none_is_given(tmp_path: Path) -> None:
    (tmp_path / "my recipe (2).yaml").write_text(GOOD, encoding="utf-8")
    assert load_recipe(tmp_path / "my recipe (2).yaml").name == "my-recipe-2"
    (tmp_path / "b.yml").write_text(GOOD + "name: other\n", encoding="utf-8-sig")
    assert load_recipe(str(tmp_path / "b.yml")).name == "other"


def test_what_is_resolved_loads_again_to_the_same_recipe() -> None:
    recipe = load_recipe(GOOD, ["stages.0.shrink.include=[a, b]", "stages.0.shrink.prune=[{pattern: x}]", "seed=7"])
    assert load_recipe(recipe.resolved()) == recipe
    assert recipe.resolved()["stages"][0]["shrink"]["damping"] == 1e-5
    written = io.StringIO()
    YAML(typ="safe", pure=True).dump(recipe.resolved(), written)
    assert load_recipe(written.getvalue()) == recipe


def test_pinning_reaches_every_value_that_can_be_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recipe_module, "pin_model", lambda model, cache: model.model_copy(update={"revision": f"pinned with {cache}"}))
    recipe = load_recipe(GOOD, ["stages.0.shrink.prune=[{pattern: x}, {pattern: y}]"])
    pinned = recipe.pinned(tmp_path, tmp_path / "cache")
    assert pinned.model.revision == f"pinned with {tmp_path / 'cache'}"
    shrink = pinned.transforms[0].value
    assert isinstance(shrink, Shrink)
    assert [each.revision for each in shrink.prune] == [f"pinned in {tmp_path}"] * 2
    assert str(shrink.calibration.revision).startswith("sha256:")
    score = pinned.evals[0].value
    assert isinstance(score, Score)
    assert str(score.revision).startswith("sha256:")
    assert pinned.settings == recipe.settings
    assert recipe.model.revision is None


def test_every_problem_is_told_at_once_with_its_place() -> None:
    text = """\
model: smollm2-135m
stages:
  - shrink: {bits: 5, damping: 2, group_size: chanel, symmetric: "yes", grup: 1}
  - shrnk
  - tone: majr
  - shrink:
    bits: 4
  - speed
  - 4
  - {}
evals:
  - score: {split: test}
  - score: {dataset: python-refrence}
  - halve
gates:
  score: 25
  speeed: "<= 1"
  tokens_per_s: "=< 3"
sed: 0
shrink: {}
seed: -1
description: 4
"""
    expected = [
        "recipe:3:20: bits: 5 is not one of 2, 3, 4, 8.",
        "recipe:3:32: damping: 2 is not at most 1.",
        "recipe:3:47: group_size: 'chanel' is not a whole number or 'channel'. Did you mean 'channel'?",
        "recipe:3:66: symmetric: 'yes' is not true or false.",
        "recipe:3:73: unknown field 'grup'. Known: bits, calibration, damping, group_size, include, prune, symmetric.",
        "recipe:4:5: unknown stage 'shrnk'. Did you mean 'shrink'?",
        "recipe:5:11: key: 'majr' is not one of 'major', 'minor'. Did you mean 'major'?",
        "recipe:6:5: 2 keys stand side by side: shrink, bits. Write `- name: {field: value}`, with the fields indented below the name and"
        " each stage after its own `- `.",
        "recipe:8:5: 'speed' is one of the evals. Move it below `evals:`.",
        "recipe:9:5: this is 4. Write the name of a stage, or `name: {field: value}`.",
        "recipe:10:5: this mapping is empty. Write `- name: {field: value}`, with the fields indented below the name and each stage after"
        " its own `- `.",
        "recipe:12:12: the field 'dataset' is missing. It is: A built-in name (`python-reference`, `wikitext2`, `c4`), ",
        "recipe:13:12: unknown data set 'python-refrence'. Did you mean 'python-reference'?",
        "recipe:14:5: 'halve' is one of the stages. Move it below `stages:`.",
        "recipe:16:10: score: 25 is not a limit in quotes, such as \"<= 25\" or \"<= 1.10x\".",
        "recipe:17:3: no eval of the recipe measures 'speeed'. Known: score, tokens_per_s.",
        "recipe:18:17: tokens_per_s: '=< 3' is no limit.",
        "recipe:19:1: unknown key 'sed'. Did you mean 'seed'?",
        "recipe:20:1: unknown key 'shrink'. 'shrink' is one of the stages: write it below `stages:`, as `- shrink`.",
        "recipe:21:7: seed: -1 is not at least 0.",
        "recipe:22:14: description: 4 is not text.",
    ]  # fmt: skip
    told = problems_of(text)
    assert len(told) == len(expected)
    for problem, beginning in zip(told, expected, strict=True):
        assert problem.startswith(beginning)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("\n", "recipe:1:1: the recipe is empty. Begin with `model: smollm2-135m` and a list of `stages:`."),
        ("- a\n- b\n", "recipe:1:1: a recipe is a mapping of name, description, model, seed, stages, evals, gates, not [\"a\", \"b\"]."),
        ("model: x/y\n", "recipe:1:1: the recipe has no stages and no evals: there is nothing to do. List some."),
        ("model: 5\nevals: [speed]\n", "recipe:1:8: model: 5 is not a mapping of fields."),
        ("model:\nevals: [speed]\n", "recipe:2:1: model: nothing is not a mapping of fields."),
        ("model: x/y\nname: a/b\nevals: [speed]\n", "recipe:2:7: name: 'a/b' is not allowed. It is: Names the artifact's directory"),
        ("model: x/y\nevals: 4\n", "recipe:2:8: evals are a list: begin each with `- `. This is 4."),
        ("model: x/y\nevals: [speed]\ngates: [a]\n", "recipe:3:8: gates are a mapping like `perplexity: \"<= 1.10x\"`, not [\"a\"]."),
        ("model: x/y\nstages: [halve: 4]\n", "recipe:2:17: halve takes a mapping of its fields (by), not 4."),
        ("model: x/y\nstages: [major: {key: minor}]\n", "recipe:2:10: 'major' is a preset and takes no fields. Write `- major`."),
        ("model: x/y\nstages: [shrink: {bits: '4'}]\n", "recipe:2:25: bits: '4' is not one of 2, 3, 4, 8. Remove the quotes."),
        ("model: x/y\nstages: [shrink: {bits: }]\n", "recipe:2:24: bits: nothing is not one of 2, 3, 4, 8."),
        ("model: x/y\nstages: [halve: {by: true}]\n", "recipe:2:22: by: true is not a whole number."),
        ("model: x/y\nstages: [halve: {by: 1.5}]\n", "recipe:2:22: by: 1.5 is not a whole number."),
        ("model: x/y\nstages: [halve: {by: 13}]\n", "recipe:2:17: halve: thirteen is not allowed."),
        ("model: x/y\nstages: [shrink: {include: a}]\n", "recipe:2:28: include: 'a' is not a list."),
        ("model: x/y\nstages: [shrink: {include: [a, 3]}]\n", "recipe:2:32: include.1: 3 is not text."),
        ("model: x/y\nstages: [shrink: {calibration: {dataset: c4, samples: 0}}]\n", "recipe:2:55: calibration.samples: 0 is not at least 1."),
        ("model: x/y\nstages: [shrink: {calibration: {dataset: c4, smples: 9}}]\n", "recipe:2:46: unknown field 'calibration.smples'. Did you mean 'samples'?"),
        ("model: x/y\nstages: [shrink: {prune: [{patern: a}]}]\n", "recipe:2:28: unknown field 'prune.0.patern'. Did you mean 'pattern'?"),
        ("model: x/y\nevals: [score: {dataset: c4, split: tes}]\n", "'c4' has no split 'tes'."),
        ("model: x/y\nevals: [speed]\ngates: {score: '< 3'}\n", "recipe:3:9: no eval of the recipe measures 'score', and score would. Write `- score` below `evals:`."),
        ("model: x/y\nstages: [halve]\ngates: {scr: '< 3'}\n", "recipe:3:9: no eval measures 'scr': the recipe has no evals."),
        ("model: x/y\nevals: [speed, speed]\n", "recipe:2:16: the eval speed is here twice with the same fields. Remove one of them."),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_a_sentence(text: str, problem: str) -> None:
    assert any(problem in told for told in problems_of(text))


def test_the_model_has_to_be_named() -> None:
    assert one_problem("evals: [speed]\nseed: 0\n").startswith("recipe:1:1: the field 'model' is missing.")


def test_an_eval_that_cannot_be_read_does_not_make_its_gate_wrong() -> None:
    assert problems_of("model: x/y\nevals: [score: {dataset: c4, windo: 3}]\ngates: {score: '< 3'}\n") == [
        "recipe:2:30: unknown field 'windo'. Did you mean 'window'?"
    ]


def test_stages_must_follow_each_other() -> None:
    text = "model: x/y\nstages:\n  - shrink\n  - tone: minor\n  - halve\n"
    assert one_problem(text) == (
        "recipe:5:5: halve reads a checkpoint with float weights and shrink leaves one with packed weights. Put halve before shrink."
    )
    assert one_problem("model: x/y\nstages:\n  - shrink\n  - shrink: {bits: 8}\n") == (
        "recipe:4:5: shrink reads a checkpoint with float weights and shrink leaves one with packed weights. Keep one of them."
    )
    assert load_recipe("model: x/y\nstages:\n  - halve\n  - halve\n  - shrink\n").transforms


def test_a_setting_is_given_once() -> None:
    assert one_problem("model: x/y\nstages:\n  - major\n  - halve\n  - tone: minor\n") == (
        "recipe:5:5: the setting tone is given twice, first in line 3. Only one can be in force; remove the other."
    )
    (problem,) = problems_of("model: x/y\nstages:\n  - halve\n  - tone: minor\n", ("stages.0=major",))
    assert problem.startswith("recipe:4:5: the setting tone is given twice, first in --set stages.0.")


def test_calibration_text_is_refused_for_evaluation() -> None:
    text = GOOD.replace("split: test", "split: train")
    assert one_problem(text) == (
        "recipe:6:47: score would measure on python-reference train, which shrink (line 3) is calibrated on."
        " The result would look better than it is. Name another split or data set for one of them."
    )


class TestOverrides:
    def test_values_are_read_as_yaml(self) -> None:
        recipe = load_recipe(
            GOOD,
            [
                "stages.0.shrink.bits=2",
                "stages.0.shrink.damping=1e-3",
                "stages.0.shrink.group_size=channel",
                "stages.0.shrink.calibration.samples=8",
                "stages.1.tone.loud=true",
                "evals.1.speed.batch_sizes=[1, 8]",
                "evals.0.score.window=32",
                "gates.tokens_per_s[batch=1]=>= 1.2x",
                "seed=3",
                "seed=4",
            ],
        )
        shrink = recipe.transforms[0].value
        assert shrink == Shrink(bits=2, damping=1e-3, group_size="channel", calibration=Calibration(dataset="python-reference", samples=8))
        assert recipe.settings[0].value == Tone(key="minor", loud=True)
        assert recipe.evals[1].value == Speed(batch_sizes=(1, 8))
        assert recipe.gates == {"score": "<= 1.10x", "tokens_per_s[batch=1]": ">= 1.2x"}
        assert recipe.seed == 4

    def test_short_forms_are_opened(self) -> None:
        text = "model: x/y\nstages: [halve, major]\nevals: [speed]\n"
        recipe = load_recipe(
            text, ["stages.0.halve.by=4", "stages.1.tone.key=minor", "model.revision=abc", "evals.0.speed.batch_sizes=[2]"]
        )
        assert [entry.value for entry in recipe.stages] == [Halve(by=4), Tone(key="minor")]
        assert recipe.model == ModelSource(name="x/y", revision="abc")
        assert load_recipe(text, ["stages.1=tone: minor"]).settings[0].value == Tone(key="minor")
        assert load_recipe(text, ["evals.0.speed.batch_sizes=[1, 2]", "evals.0.speed.batch_sizes.0=4"]).evals[0].value == Speed(
            batch_sizes=(4, 2)
        )

    def test_the_given_data_is_left_alone(self) -> None:
        data = {"model": "x/y", "stages": [{"halve": {"by": 2}}]}
        load_recipe(data, ["stages.0.halve.by=4"], model="other/one")
        assert data == {"model": "x/y", "stages": [{"halve": {"by": 2}}]}

    def test_the_model_is_replaced_whole(self) -> None:
        text = "model: {name: a/b, revision: c, trust_remote_code: true}\nevals: [speed]\n"
        assert load_recipe(text, model="d/e").model == ModelSource(name="d/e")
        assert load_recipe("evals: [speed]\nseed: 1\n", model="d/e").model == ModelSource(name="d/e")

    @pytest.mark.parametrize(
        ("override", "problem"),
        [
            ("stages.0.shrink.bits=5", "--set stages.0.shrink.bits: bits: 5 is not one of 2, 3, 4, 8."),
            ("stages.0.shrink.bit=4", "--set stages.0.shrink.bit: unknown field 'bit'. Did you mean 'bits'?"),
            ("stages.0.halve.by=4", "--set stages.0.halve.by: stages.0 is shrink, not halve. Write stages.0.shrink.by."),
            ("stages.shrink.bits=4", "--set stages.shrink.bits: stages has 2 items, numbered from 0 to 1, and 'shrink' is no number. Write stages.0.shrink.bits."),
            ("stages.nope.bits=4", "--set stages.nope.bits: stages has 2 items, numbered from 0 to 1, and 'nope' is no number."),
            ("stages.2=halve", "--set stages.2: stages has 2 items, numbered from 0 to 1; there is no 2."),
            ("stages.0.shrink.bits.deep=4", "--set stages.0.shrink.bits.deep: stages.0.shrink.bits is 8, and nothing can be set below it. Set it as a whole."),
            ("stages.0=shrnk", "--set stages.0: unknown stage 'shrnk'. Did you mean 'shrink'?"),
            ("modl=x", "--set modl: unknown key 'modl'. Did you mean 'model'?"),
            ("seed", "--set seed: write PATH=VALUE, for example stages.0.gptq.group_size=32."),
            ("seed=[1", "--set seed: the value '[1' is not YAML: this is not YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'."),
            ("gates.score=4x", "--set gates.score: score: '4x' is no limit."),
            ("evals.0.score.split=train", "--set evals.0.score.split"),
        ],
    )  # fmt: skip
    def test_a_problem_has_the_override_as_its_place(self, override: str, problem: str) -> None:
        assert any(told.startswith(problem) for told in problems_of(GOOD, (override,)))

    def test_an_item_of_no_list(self) -> None:
        text = "model: x/y\nevals: [speed]\n"
        assert "--set stages.0: stages has no items; there is no 0." in problems_of(text, ("stages.0=halve",))

    def test_the_model_of_the_command_line_is_checked(self) -> None:
        (problem,) = problems_of("model: a/b\nevals: [speed]\nseed: x\n", model="c/d")
        assert problem == "recipe:3:7: seed: 'x' is not a whole number."


class TestFiles:
    def test_a_shipped_recipe_is_found_by_name(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "good.yaml").write_text(GOOD, encoding="utf-8")
        monkeypatch.setattr("optkit.recipe_files.shipped_recipes", lambda: {"good": tmp_path / "good.yaml"})
        assert load_recipe("good").name == load_recipe("good.yaml").name == "good"
        with pytest.raises(RecipeError, match=r"^goood: there is no such recipe\. Did you mean 'good'\?"):
            load_recipe("goood")
        with pytest.raises(RecipeError, match=r"there is no such recipe\. Shipped recipes: good\."):
            load_recipe("zzz")

    def test_a_missing_file_gets_the_nearest_one(self, tmp_path: Path) -> None:
        (tmp_path / "llama.yaml").write_text(GOOD, encoding="utf-8")
        with pytest.raises(RecipeError, match=rf"there is no such recipe. Did you mean '{tmp_path}/llama.yaml'\?"):
            load_recipe(tmp_path / "lama.yaml")
        with pytest.raises(RecipeError, match="there is no such recipe"):
            load_recipe(tmp_path / "no" / "such" / "folder.yaml")

    def test_a_directory_is_no_recipe(self, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match="this is a directory, not a recipe. Name a file in it: it holds no .yaml file."):
            load_recipe(tmp_path)
        (tmp_path / "a.yaml").write_text(GOOD, encoding="utf-8")
        with pytest.raises(RecipeError, match=r"Name a file in it: a\.yaml\."):
            load_recipe(tmp_path)

    def test_a_file_that_is_no_text(self, tmp_path: Path) -> None:
        file = tmp_path / "r.yaml"
        file.write_bytes(b"model: x\nname: \xff\n")
        with pytest.raises(RecipeError) as caught:
            load_recipe(file)
        assert str(caught.value) == f"{file}:2:7: the byte 0xff is not UTF-8 text. Save the file as UTF-8."
        file.write_bytes(b"\0" * 2_000_000)
        with pytest.raises(RecipeError, match="2,000,000 bytes are too many for a recipe"):
            load_recipe(file)

    def test_an_empty_file(self, tmp_path: Path) -> None:
        file = tmp_path / "r.yaml"
        file.touch()
        with pytest.raises(RecipeError, match=r"r\.yaml:1:1: the recipe is empty"):
            load_recipe(file)

    def test_line_and_column_are_those_of_the_file(self, tmp_path: Path) -> None:
        file = tmp_path / "r.yaml"
        file.write_text(GOOD.replace("bits: 8", "bits: 7"), encoding="utf-8", newline="\r\n")
        with pytest.raises(RecipeError) as caught:
            load_recipe(file)
        (problem,) = caught.value.problems
        assert (problem.file, problem.line, problem.column) == (str(file), 3, 20)


def test_a_recipe_cannot_be_changed() -> None:
    recipe = load_recipe(GOOD)
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 4  # type: ignore[misc]
    assert isinstance(recipe, Recipe)


def test_a_key_that_is_there_twice_hides_no_other_problem():
    with pytest.raises(RecipeError) as caught:
        load_recipe("model: a/b\nmodel: c/d\nseed: .inf\nevals: [spead]\nsed: 1\n")
    assert [(problem.line, problem.message.split(".")[0]) for problem in caught.value.problems] == [
        (2, "the key 'model' is here twice, first in line 1"),
        (3, ""),
        (4, "unknown eval 'spead'"),
        (5, "unknown key 'sed'"),
    ]


def test_a_suffix_alone_makes_no_name_near(tmp_path):
    (tmp_path / "rtn.yaml").touch()
    with pytest.raises(RecipeError, match=r"nosuch.yaml: there is no such recipe. Shipped recipes: "):
        load_recipe(tmp_path / "nosuch.yaml")
