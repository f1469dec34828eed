import io
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from optkit.errors import RecipeError
from optkit.recipe import recipe as recipe_module
from optkit.recipe.recipe import Recipe, load_recipe
from optkit.source.calibration import Calibration
from optkit.source.models import ModelSource
from tests.support.recipe_stand_ins import GOOD, Halve, Score, Shrink, Speed, Tone, problems_of, register_stand_ins


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    register_stand_ins(monkeypatch)


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
    (tmp_path / "_my recipe (2).yaml").write_text(GOOD, encoding="utf-8")
    assert load_recipe(tmp_path / "_my recipe (2).yaml").name == "my-recipe-2"
    (tmp_path / "b.yml").write_text(GOOD + "name: other\n", encoding="utf-8-sig")
    assert load_recipe(str(tmp_path / "b.yml")).name == "other"


def test_what_is_resolved_loads_again_to_the_same_recipe() -> None:
    recipe = load_recipe(GOOD, ["stages.0.shrink.include=[a, b]", "stages.0.shrink.prune=[{pattern: x}]", "seed=7"])
    assert load_recipe(recipe.resolved()) == recipe
    assert recipe.resolved()["stages"][0]["shrink"]["damping"] == 1e-5
    silent = recipe.model_copy(update={"attribution": False})
    assert load_recipe(silent.resolved()) == silent
    assert recipe.resolved().keys() == Recipe.model_fields.keys()
    written = io.StringIO()
    YAML(typ="safe", pure=True).dump(recipe.resolved(), written)
    assert load_recipe(written.getvalue()) == recipe


def test_pinning_reaches_every_value_that_can_be_pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        recipe_module,
        "pin_and_remember",
        lambda model, cache, _: model.model_copy(update={"revision": f"pinned with {cache}"}),
    )
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
        assert shrink == Shrink(
            bits=2, damping=1e-3, group_size="channel", calibration=Calibration(dataset="python-reference", samples=8)
        )
        assert recipe.settings[0].value == Tone(key="minor", loud=True)
        assert recipe.evals[1].value == Speed(batch_sizes=(1, 8))
        assert recipe.gates == {"score": "<= 1.10x", "tokens_per_s[batch=1]": ">= 1.2x"}
        assert recipe.seed == 4

    def test_short_forms_are_opened(self) -> None:
        text = "model: x/y\nstages: [halve, major]\nevals: [speed]\n"
        recipe = load_recipe(
            text,
            ["stages.0.halve.by=4", "stages.1.tone.key=minor", "model.revision=abc", "evals.0.speed.batch_sizes=[2]"],
        )
        assert [entry.value for entry in recipe.stages] == [Halve(by=4), Tone(key="minor")]
        assert recipe.model == ModelSource(name="x/y", revision="abc")
        assert load_recipe(text, ["stages.1=tone: minor"]).settings[0].value == Tone(key="minor")
        assert load_recipe(text, ["evals.0.speed.batch_sizes=[1, 2]", "evals.0.speed.batch_sizes.0=4"]).evals[
            0
        ].value == Speed(batch_sizes=(4, 2))

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
            ("stages.0.shrink.bits=5", "--set stages.0.shrink.bits: 5 is not one of 2, 3, 4, 8."),
            ("stages.0.shrink.bit=4", "--set stages.0.shrink.bit: unknown field 'bit'. Did you mean 'bits'?"),
            ("stages.0.halve.by=4", "--set stages.0.halve.by: stages.0 is "
                                    "shrink, not halve. Write stages.0.shrink.by."),
            ("stages.shrink.bits=4", "--set stages.shrink.bits: stages has 2 items, "
                                     "numbered from 0 to 1, and 'shrink' is no number. Write stages.0.shrink.bits."),
            ("stages.nope.bits=4", "--set stages.nope.bits: stages has 2 items, "
                                   "numbered from 0 to 1, and 'nope' is no number."),
            ("stages.2=halve", "--set stages.2: stages has 2 items, numbered from 0 to 1; there is no 2."),
            ("stages.0.shrink.bits.deep=4", "--set stages.0.shrink.bits.deep: "
                                            "stages.0.shrink.bits is 8, and nothing can be set "
                                            "below it. Set it as a whole."),
            ("stages.0=shrnk", "--set stages.0: unknown stage 'shrnk'. Did you mean 'shrink'?"),
            ("modl=x", "--set modl: unknown key 'modl'. Did you mean 'model'?"),
            ("seed", "--set seed: write PATH=VALUE, for example stages.0.gptq.group_size=32."),
            ("seed=[1", "--set seed: the value '[1' is not YAML: this is "
                        "not YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'."),
            ("gates.score=4x", "--set gates.score: '4x' is no limit."),
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
        monkeypatch.setattr("optkit.recipe.files.shipped_recipes", lambda: {"good": tmp_path / "good.yaml"})
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
        with pytest.raises(
            RecipeError, match="this is a directory, not a recipe. Name a file in it: it holds no .yaml file."
        ):
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
        with pytest.raises(RecipeError, match="more than 1,000,000 bytes are too many for a recipe"):
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


def test_a_suffix_alone_makes_no_name_near(tmp_path):
    (tmp_path / "rtn.yaml").touch()
    with pytest.raises(RecipeError, match=r"nosuch.yaml: there is no such recipe. There is no file /.*nosuch.yaml"):
        load_recipe(tmp_path / "nosuch.yaml")
