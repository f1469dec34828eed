"""Too little text is found by the plan: counted as the training counts, quickly if there is
enough, and remembered.
"""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit import pipeline
from optkit.errors import SourceError, StageError
from optkit.execute import check_texts, execute
from optkit.plan import Plan, make_plan
from optkit.recipe.recipe import Recipe, load_recipe
from optkit.source import token_counts
from optkit.source.text_place import TextPlace
from optkit.source.token_counts import TokenCounts
from optkit.source.training_text import TrainingText
from optkit.stage import Context
from optkit.stages.distill import Distill
from optkit.stages.qat import Qat
from optkit.store.store import Store
from optkit.training.budget import Budget
from optkit.training.data import read_texts
from tests.support.fresh_python import imported_by

LENGTH = 16
SHORT = {"sequence_length": LENGTH, "batch_size": 2, "held_out": 2, "precision": "float32", "patience": None}
TOO_LITTLE = (
    r"^distill: 1,000,000 tokens are asked for, and the texts have ([\d,]+) to train on. A "
    r"step takes 32. Set `epochs: \d+`"
)


@pytest.fixture
def texts(tmp_path: Path) -> tuple[TrainingText, ...]:
    documents, running = tmp_path / "documents.jsonl", tmp_path / "running.txt"
    lines = [f"document {number} says something of its own" for number in range(40)]
    documents.write_text("".join(json.dumps({"text": line}) + "\n" for line in [*lines, "  "]), encoding="utf-8")
    running.write_text("a text that runs on and on. " * 60, encoding="utf-8")
    return tuple(TrainingText.model_validate(str(each)).pinned(None) for each in (documents, running))


@pytest.fixture
def recipe(tiny_model, texts) -> Any:
    def make(**fields: Any) -> Recipe:
        named = [text.model_dump() for text in texts]
        stages = [{"cast": {"dtype": "bfloat16"}}, {"distill": SHORT | {"texts": named} | fields}]
        return load_recipe({"name": "r", "model": {"name": str(tiny_model("llama"))}, "stages": stages})

    return make


def planned(recipe: Recipe, store: Store) -> Plan:
    return make_plan(recipe.pinned(None), store, "cpu")


@pytest.mark.parametrize("pieces", [1 << 16, 300])
def test_counts_are_those_of_the_training(tiny_model, texts, tmp_path, monkeypatch, pieces):
    monkeypatch.setattr(token_counts, "PIECE_CHARACTERS", pieces)
    total = len(read_texts(texts, tiny_model("llama"), LENGTH, 2, None).tokens)
    counts = TokenCounts(tiny_model("llama"), None, tmp_path / "counts")
    assert counts.enough_sequences(texts, LENGTH, 3) in range(3, total + 1)
    assert counts.enough_sequences(texts, LENGTH, total) == total
    assert counts.enough_sequences(texts, LENGTH, total + 5) == total


def test_what_was_counted_is_not_counted_again(tiny_model, texts, tmp_path, monkeypatch):
    """Until more is asked for than was counted."""
    monkeypatch.setattr(token_counts, "DOCUMENTS_AT_ONCE", 4)
    counts = TokenCounts(tiny_model("llama"), None, tmp_path / "counts")
    counts.enough_sequences(texts[:1], LENGTH, 4)
    total = counts.enough_sequences(texts, LENGTH, 10_000)
    monkeypatch.delattr(tokenizers.Tokenizer, "from_file")
    monkeypatch.delattr(token_counts, "load_tokenizer")
    assert TokenCounts(tiny_model("llama"), None, tmp_path / "counts").enough_sequences(texts, LENGTH, 10_000) == total
    (next((tmp_path / "counts").glob("*.json"))).write_text("{", encoding="utf-8")
    with pytest.raises(SourceError):
        counts.enough_sequences(texts, LENGTH, 10_000)


def test_another_tokenizer_counts_anew(tiny_model, texts, tmp_path):
    other = Path(shutil.copytree(tiny_model("llama"), tmp_path / "other"))
    described = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(
        json.dumps({key: value for key, value in described.items() if key != "eos_token"})
    )
    with_ends, without = (
        TokenCounts(place, None, tmp_path / "counts").enough_sequences(texts[:1], 1, 10_000)
        for place in (tiny_model("llama"), other)
    )
    assert with_ends is not None
    assert without == with_ends - 40


def test_what_is_not_at_hand_is_not_said(tiny_model, texts, tmp_path):
    hub = TrainingText(dataset="org/name", revision="a" * 40)
    counts = TokenCounts(tiny_model("llama"), None, tmp_path / "counts")
    assert counts.enough_sequences((*texts, hub), LENGTH, 10_000) is None
    assert counts.enough_sequences((hub, *texts), LENGTH, 2) is not None, "there is enough without it"
    assert TokenCounts(tmp_path, None, tmp_path / "counts").enough_sequences(texts, LENGTH, 2) is None


@given(
    tokens=st.none() | st.integers(1, 500),
    epochs=st.integers(1, 4),
    together=st.integers(1, 6),
    held_out=st.integers(1, 5),
    written=st.integers(0, 20),
    sequences=st.integers(0, 200),
)
@settings(max_examples=200)
def test_the_least_that_is_enough(tokens, epochs, together, held_out, written, sequences):
    budget = Budget(4, together, held_out, tokens, epochs)

    def is_enough() -> bool:
        try:
            budget.refuse_nothing_left(sequences)
            budget.steps(sequences - held_out + written)
        except StageError:
            return False
        return True

    assert (sequences >= budget.least_sequences(written)) == is_enough()


def test_the_plan_says_what_the_run_would_say(recipe, tmp_path):
    store = Store(tmp_path / "store")
    with pytest.raises(StageError, match=TOO_LITTLE) as told:
        pipeline.plan(recipe(tokens=1_000_000), store=store.root)
    with pytest.raises(StageError) as ran:
        execute(planned(recipe(tokens=1_000_000), store), store, Context())
    assert not (store.root / "steps").exists(), "nothing ran"
    stage = recipe(tokens=1_000_000).transforms[1].value
    with pytest.raises(StageError) as later:
        stage.run(Path(recipe().model.name), tmp_path / "target", Context(origin=Path(recipe().model.name)))
    assert str(told.value) == str(ran.value) == str(later.value)


def test_everything_is_held_out(recipe, tmp_path):
    with pytest.raises(
        StageError,
        match=r"^distill: the texts give \d+ sequences of 16 tokens, and 5,000 are to be held out. Nothing is left",
    ):
        pipeline.plan(recipe(held_out=5000), store=tmp_path / "store")


def test_text_that_a_teacher_writes_counts(recipe, tmp_path):
    with pytest.raises(StageError, match=r"10,016 tokens are asked for"):
        pipeline.plan(recipe(tokens=10_000), store=tmp_path / "store")
    assert pipeline.plan(recipe(tokens=10_000, generated={"tokens": 10_000}), store=tmp_path / "store").pending


def test_a_step_that_is_there_needs_no_text(recipe, tmp_path):
    store = Store(tmp_path / "store")
    plan = planned(recipe(tokens=1_000_000), store)
    with store.write(plan.steps[-1].key) as draft:
        (draft.model / "config.json").write_text("{}", encoding="utf-8")
    assert pipeline.plan(recipe(tokens=1_000_000), store=store.root).pending == ()


def test_a_model_that_is_not_there_yet_is_checked_when_it_is(recipe, tmp_path):
    store = Store(tmp_path / "store")
    plan = planned(recipe(tokens=1_000_000), store)
    away = plan.model_copy(
        update={"steps": (plan.steps[0].model_copy(update={"directory": None, "hit": False}), *plan.steps[1:])}
    )
    check_texts(away, store, None)
    with pytest.raises(StageError, match=TOO_LITTLE):
        check_texts(away, store, None, Path(recipe().model.name))


def test_a_stage_within_a_stage_is_asked(texts, tiny_model, tmp_path):
    stage = Qat.model_validate(
        {"training": SHORT | {"texts": [text.model_dump() for text in texts], "tokens": 1_000_000}}
    )
    with pytest.raises(StageError, match=r"^qat.training: 1,000,000 tokens are asked for"):
        stage.check_texts(TextPlace(tiny_model("llama"), None, tmp_path / "counts"))


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        (0, {}, "0 of 41 documents have 64 tokens and 2 are needed. .*set `packing: joined`"),
        (0, {"packing": "joined"}, None),
        (0, {"sequence_length": 4}, None),
        (1, {}, None),
        (
            1,
            {"sequence_length": 513},
            "sequences of 513 tokens, and the model was built for 512. Use a sequence_length",
        ),
        (1, {"samples": 99}, "the text has .* tokens and 99 x 64 = 6,336 are needed. Lower `samples` to"),
    ],
)
def test_a_plan_refuses_a_calibration_without_long_enough_windows(texts, tiny_model, tmp_path, text, fields, message):
    calibration = {"dataset": texts[text].dataset, "samples": 2, "sequence_length": 64} | fields
    stages = [{"gptq": {"calibration": calibration}}]
    data = {"name": "r", "model": {"name": str(tiny_model("llama"))}, "stages": stages}
    with pytest.raises(SourceError, match=message) if message else nullcontext():
        pipeline.plan(load_recipe(data), store=tmp_path / "store")


def test_enough_text_is_counted_without_torch(texts, tiny_model, tmp_path):
    stage = Distill.model_validate(SHORT | {"texts": [text.model_dump() for text in texts]})
    place = f"TextPlace(Path({str(tiny_model('llama'))!r}), None, Path({str(tmp_path / 'counts')!r}))"
    code = f"""from pathlib import Path
from optkit.source.text_place import TextPlace; from optkit.stages.distill import Distill
Distill.model_validate_json({stage.model_dump_json()!r}).check_texts({place})"""
    assert not {"torch", "transformers"} & imported_by(code)
