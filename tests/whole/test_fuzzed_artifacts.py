"""What an artifact says of itself, damaged: it is read, or refused as the file's fault."""

import json
from pathlib import Path
from random import Random

import pytest
from optkit_cli.compare_view import comparison_view
from optkit_cli.scorecard_view import whole_scorecard

from optkit import pipeline
from optkit.comparison import compare
from optkit.page import comparison_page, scorecard_page
from optkit.recipe.recipe import load_recipe
from optkit.scorecard import to_markdown
from optkit.store.contents import survey
from optkit.store.store import Store
from tests.conftest import TinyModel
from tests.support import mutations
from tests.support.fuzzing import Changed, damages, read_or_refused


@pytest.fixture(scope="module")
def artifact(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    desk = tmp_path_factory.mktemp("desk")
    perplexity = "{perplexity: {dataset: python-reference, split: test, window: 32, windows: 2}}"
    text = f"name: tiny\nmodel: {tiny_model('llama')}\nstages: [bf16, sdpa]\nevals: [footprint, {perplexity}]\n"
    pipeline.run(load_recipe(text), out=desk / "out", store=desk / "store", device="cpu")
    return desk / "out"


@damages(150)
def test_records_of_artifacts(artifact: Path, draw: Random) -> None:
    from optkit.artifact import read_finished, settings_of, steps_of
    from optkit.progress import SilentProgress
    from optkit.trust import allow_code

    def read() -> None:
        found = read_finished(artifact)
        settings = settings_of(found)
        allow_code(found, settings, False, SilentProgress())
        steps_of(found)
        load_recipe(found.record.recipe)
        found.check()
        pipeline.read_scorecard(artifact)

    with Changed(
        artifact / "optkit.json", mutations.damaged_json_text(json.loads((artifact / "optkit.json").read_bytes()), draw)
    ):
        read_or_refused(read)


@damages(150)
def test_scorecards(artifact: Path, draw: Random) -> None:
    def read() -> None:
        card = pipeline.read_scorecard(artifact)
        assert whole_scorecard(card, artifact)
        assert to_markdown(card)
        assert comparison_view(compare([artifact, artifact]))
        assert scorecard_page(card, artifact)
        assert comparison_page(compare([artifact, artifact]))

    with Changed(
        artifact / "scorecard.json",
        mutations.damaged_json_text(json.loads((artifact / "scorecard.json").read_bytes()), draw),
    ):
        read_or_refused(read)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    made = Store(tmp_path_factory.mktemp("store"))
    for key, source in (("a" * 64, None), ("b" * 64, "a" * 64)):
        with made.write(key) as draft:
            (draft.model / "config.json").write_text("{}", encoding="utf-8")
            draft.record.update(kind="cast", fields={"dtype": "bfloat16"}, source_key=source, model="llama")
    return made


@damages(150)
def test_records_of_steps(store: Store, draw: Random) -> None:
    path = store.root / "steps" / ("b" * 64) / "record.json"
    with Changed(path, mutations.damaged_json_text(json.loads(path.read_bytes()), draw)):
        read_or_refused(lambda: survey(store))
        read_or_refused(lambda: store.get("b" * 64))


@damages(50)
def test_numbers_in_the_store(store: Store, draw: Random) -> None:
    store.put_json("c" * 64, {"metrics": [], "seconds": 1.5})
    path = store.root / "metrics" / f"{'c' * 64}.json"
    path.write_bytes(mutations.damaged_json_text(json.loads(path.read_bytes()), draw))
    assert read_or_refused(lambda: store.get_json("c" * 64))


def test_a_step_that_names_itself_as_its_source(store: Store) -> None:
    path = store.root / "steps" / ("b" * 64) / "record.json"
    record = json.loads(path.read_bytes())
    del record["model"]
    with Changed(path, json.dumps(record | {"source_key": "b" * 64}).encode()):
        assert {step.key[0]: step.model for step in survey(store).steps} == {"a": "llama", "b": ""}
