"""What is published of an artifact says names and digests, and the place of its model is found or
asked for again.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optkit_cli.main import main

from optkit import pipeline
from optkit.artifact import read_artifact
from optkit.common.own_files import is_own, without_home
from optkit.errors import SourceError, UsageError
from optkit.recipe.recipe import load_recipe
from optkit.scorecard.published import without_places
from optkit.source.models import ModelSource
from optkit.source.places import find_recorded, pin_and_remember
from optkit.store.files import list_files

RECIPE = """\
name: tiny
model: {model}
stages:
  - prune: {{sparsity: 0.5, calibration: {{dataset: {text}, samples: 2, sequence_length: 8}}}}
  - speculative: {{draft: {draft}, tokens: 2}}
evals:
  - footprint
  - perplexity: {{dataset: {text}, window: 8, windows: 4}}
"""


@pytest.fixture
def home(tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home directory with a model, a draft, texts and an artifact made of them."""
    home = tmp_path / "private"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("OPTKIT_STORE", str(tmp_path / "cache"))
    for name in ("models/mine", "models/draft"):
        shutil.copytree(tiny_model("llama"), home / name)
    (home / "texts").mkdir()
    (home / "texts" / "some.txt").write_text("Many words in a row. " * 80)
    (home / "texts" / "other.txt").write_text("Another text altogether: one, two, three. " * 80)
    recipe = RECIPE.format(model=home / "models/mine", draft=home / "models/draft", text=home / "texts" / "some.txt")
    recipe = recipe.replace("some.txt, window", "other.txt, window")
    (tmp_path / "tiny.yaml").write_text(recipe, encoding="utf-8")
    (tmp_path / "evals.yaml").write_text("evals:\n  - footprint\n", encoding="utf-8")
    return home


@pytest.fixture
def made(home: Path, tmp_path: Path) -> Path:
    pipeline.run(tmp_path / "tiny.yaml", out=tmp_path / "out", store=tmp_path / "cache", device="cpu")
    return tmp_path / "out"


def test_no_place_is_published(made: Path, home: Path, tmp_path: Path) -> None:
    for name in filter(is_own, list_files(made)):
        assert not re.search(rf"{re.escape(str(tmp_path))}", (made / name).read_text(encoding="utf-8")), name
    record = read_artifact(made).record
    assert record.recipe["model"]["name"] == "mine"
    assert record.recipe["model"]["revision"].startswith("sha256:")
    assert record.settings[0]["speculative"]["draft"]["name"] == "draft"
    assert record.calibrated_on[0]["dataset"] == "some.txt"
    card = json.loads((made / "scorecard.json").read_text(encoding="utf-8"))
    assert card["recipe"]["evals"][1]["perplexity"]["dataset"] == "other.txt"


def test_the_same_recipe_finds_everything_again(made: Path, tmp_path: Path) -> None:
    todo = pipeline.plan(tmp_path / "tiny.yaml", store=tmp_path / "cache", device="cpu")
    assert all(each.hit for each in (*todo.steps, *todo.evals))  # type: ignore[attr-defined]
    assert todo.artifact_key == read_artifact(made).record.key


def evaluate(made: Path, tmp_path: Path, **options: Any) -> Any:
    return pipeline.evaluate(str(made), tmp_path / "evals.yaml", store=tmp_path / "cache", device="cpu", **options)


def test_what_was_seen_here_is_found(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()  # another directory of this name
    assert evaluate(made, tmp_path).rows
    pipeline.open_artifact(made, device="cpu").close()


def test_elsewhere_it_is_asked_for(made: Path, home: Path, tmp_path: Path) -> None:
    (tmp_path / "cache" / "places.json").unlink()
    shutil.move(home / "models" / "draft", tmp_path / "draft")  # beside the artifact
    revision = read_artifact(made).record.recipe["model"]["revision"]
    with pytest.raises(SourceError) as caught:
        evaluate(made, tmp_path)
    assert str(caught.value).startswith(
        f"{tmp_path}: the model mine that the artifact was made from is not found. Its record says {revision}"
    )
    assert str(caught.value).endswith("Name its directory or file: --model PATH.")
    assert evaluate(made, tmp_path, unmodified=str(home / "models" / "mine")).rows
    with pytest.raises(SourceError, match="the model is sha256:.* and not sha256:"):
        (home / "models" / "mine" / "README.md").write_text("changed")
        evaluate(made, tmp_path, unmodified=str(home / "models" / "mine"))


def test_the_option(made: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cache" / "places.json").unlink()
    shutil.move(home / "models" / "draft", tmp_path / "draft")
    words = [
        "eval",
        str(made),
        "--evals",
        str(tmp_path / "evals.yaml"),
        "--store",
        str(tmp_path / "cache"),
        "--device",
        "cpu",
    ]
    assert main(words) == 1
    assert "--model PATH" in capsys.readouterr().err
    assert main([*words, "--model", str(home / "models" / "mine")]) == 0
    with pytest.raises(UsageError, match="--model: .* is no artifact"):
        evaluate(home / "models" / "mine", tmp_path, unmodified="x")


def test_a_place_that_holds_something_else_is_not_taken(home: Path, tmp_path: Path) -> None:
    pinned = pin_and_remember(ModelSource(name=str(home / "models" / "mine")), tmp_path)
    recorded = pinned.model_copy(update={"name": "mine"})
    assert find_recorded(recorded, tmp_path, cache=tmp_path) == pinned
    (home / "models" / "mine" / "README.md").write_text("changed")
    with pytest.raises(SourceError, match="is not found"):
        find_recorded(recorded, tmp_path, cache=tmp_path)


def test_names_that_everybody_has_stay() -> None:
    hub = ModelSource(name="org/name", revision="0" * 40)
    assert find_recorded(hub, Path()) == hub


def test_texts(home: Path, tmp_path: Path) -> None:
    recipe = load_recipe(tmp_path / "tiny.yaml").pinned(None)
    said = {
        "a": [f"wrong: {home}/models/mine/config.json", str(home / "texts/some.txt")],
        "b": f"{home}/x",
        "c": 1,
        "d": "a/b",
    }
    assert without_places(said, recipe) == {
        "a": ["wrong: mine/config.json", "some.txt"],
        "b": "~/x",
        "c": 1,
        "d": "a/b",
    }


def test_a_home_at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    assert without_home("/a/b") == "/a/b"
