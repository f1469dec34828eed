"""What is known of the texts that shaped a model, and whether a text that it is measured on is one
of them.
"""

import json
import random
from collections import Counter
from dataclasses import astuple
from pathlib import Path

import pytest

from optkit.common.frozen import Frozen
from optkit.errors import ArtifactError, EvalError
from optkit.pipeline import run
from optkit.recipe.recipe import load_recipe
from optkit.source.calibration import Calibration
from optkit.source.lineage import DRAFT, LIMIT, Reader, shared_with, with_sketches
from optkit.source.shingles import KEPT, common, sketch
from optkit.source.texts import TextSource
from tests.conftest import TinyModel

DATA = Path(__file__).parents[3] / "shared" / "data"
WORDS = ["".join(random.Random(seed).choices("abcdefgh", k=4)) for seed in range(800)]
OTHER = TextSource(dataset="other.txt")


def made_up(words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def runs_of_eight(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[start : start + 8]) for start in range(len(words) - 7)}


@pytest.mark.parametrize(
    ("mine", "theirs", "both"),
    [(30_000, 30_000, 10_000), (300_000, 5_000, 2_000), (3_000, 200_000, 3_000), (900, 700, 90)],
)
def test_the_shares_are_those_of_all_runs_of_words(mine: int, theirs: int, both: int) -> None:
    shared = made_up(both, seed=0)
    text, sketched = f"{made_up(mine - both, seed=1)} {shared}", f"{shared} {made_up(theirs - both, seed=2)}"
    found = common(sketch([sketched]), [text])
    ours, others = runs_of_eight(text), runs_of_eight(sketched)
    assert found.of_text == pytest.approx(len(ours & others) / len(ours), abs=0.03)
    assert found.of_sketched == pytest.approx(len(ours & others) / len(others), abs=0.03)


def test_a_sketch_is_bounded_and_the_same_however_the_text_is_divided() -> None:
    long = made_up(50_000, seed=3)
    assert len(sketch([long])) == (KEPT * 8 + 2) // 3 * 4
    half = len(long) // 2
    assert common(sketch([long[:half], long[half:]]), [long]).of_text > 0.999
    assert sketch(["too few words"]) == ""


@pytest.mark.parametrize(
    "edition",
    [
        lambda text: text.upper(),
        lambda text: text.replace(" ", "\n\n"),
        lambda text: text.replace(" ", " , "),
        lambda text: "".join(f"{word}. " for word in text.split()),
        lambda text: " ".join("<unk>" if word.startswith("ab") else word for word in text.split()),
    ],
)
def test_another_edition_of_a_text_is_that_text(edition) -> None:
    text = made_up(5_000, seed=4)
    assert common(sketch([text]), [edition(text)]).of_text > 0.8


def test_a_script_without_spaces_has_words_too() -> None:
    signs = "".join(random.Random(5).choices([chr(code) for code in range(0x4E00, 0x4F00)], k=2_000))
    assert common(sketch([signs]), [signs[500:]]).of_text == 1.0


def test_splits_of_one_data_set_have_next_to_nothing_in_common() -> None:
    train, test = (TextSource(dataset="python-reference", split=split).documents(None) for split in ("train", "test"))
    assert max(astuple(common(sketch(train), test))) < LIMIT / 4
    assert max(astuple(common(sketch(test), train))) < LIMIT / 4


@pytest.mark.skipif(not (DATA / "wikitext2_raw").is_dir(), reason="needs ../shared/data")
def test_the_splits_of_wikitext_differ_and_its_tokenised_edition_does_not() -> None:
    test, valid = (TextSource(dataset="wikitext2", split=split).joined(DATA) for split in ("test", "validation"))
    assert max(astuple(common(sketch([valid]), [test]))) < LIMIT / 4
    words = test.split()
    counts = Counter(words)
    tokenised = " ".join(word if counts[word] >= 3 else "<unk>" for word in words)
    assert common(sketch([tokenised]), [test[: len(test) // 10]]).of_text > 0.4
    assert common(sketch([test[: len(test) // 2]]), [test]).of_text == pytest.approx(0.5, abs=0.03)


class Reads(Frozen):
    """A stage with a text among its fields."""

    calibration: Calibration
    more: tuple[Calibration, ...] = ()


def test_a_sketch_is_of_the_windows_that_were_read(tiny_model: TinyModel, tmp_path: Path) -> None:
    text = made_up(6_000, seed=6)
    (tmp_path / "mine.txt").write_text(text, encoding="utf-8")
    calibration = Calibration.model_validate(
        {"dataset": str(tmp_path / "mine.txt"), "samples": 4, "sequence_length": 256}
    )
    stage = Reads(calibration=Calibration(dataset="python-reference"), more=(calibration,))
    unknown = {"dataset": "d", "split": "s", "revision": "r"}
    first, second = with_sketches((calibration.identity(), unknown), stage, Reader(tiny_model("llama"), None))
    assert second == unknown
    assert {key: first[key] for key in unknown} == calibration.identity()
    read = calibration.passages(tiny_model("llama"), None)
    assert all(passage.strip() in text for passage in read)
    assert common(first["sketch"], read).of_text == 1.0
    assert 0 < common(first["sketch"], [text]).of_text < 0.5


def test_a_small_share_of_a_long_text_is_let_through_and_what_is_refused_is_said() -> None:
    calibrated = {"dataset": "a/b", "split": "test[:50%]", "revision": "", "sketch": sketch([made_up(20_000, seed=7)])}
    few, many = made_up(200, seed=7), made_up(10_000, seed=7)
    rest = made_up(20_000, seed=8)
    assert shared_with(OTHER, [f"{few} {rest}"], [calibrated]) == ""
    assert shared_with(OTHER, [f"{many} {rest}"], [calibrated]).endswith(
        "% of it stands in a/b (test[:50%]), which the model was calibrated on"
    )
    calibrated["sketch"] = sketch([few])
    assert (
        shared_with(OTHER, [f"{few} {rest}"], [calibrated]) == "100% of a/b (test[:50%]), which the "
        "model was calibrated on, stands in it"
    )


def recipe_of(model: Path, *stages: object, text: Path) -> dict[str, object]:
    return {
        "name": "x",
        "model": str(model),
        "stages": list(stages),
        "evals": [{"perplexity": {"dataset": str(text), "window": 64, "windows": 8}}],
    }


def test_what_was_made_of_an_artifact_is_not_measured_on_the_artifacts_calibration_text(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTKIT_STORE", str(tmp_path / "store"))
    mine, edition, others = tmp_path / "mine.txt", tmp_path / "edition.txt", tmp_path / "others.txt"
    mine.write_text(made_up(3_000, seed=9), encoding="utf-8")
    edition.write_text(f"{made_up(1_500, seed=9).upper()} {made_up(1_500, seed=10)}", encoding="utf-8")
    others.write_text(made_up(3_000, seed=11), encoding="utf-8")
    calibrated = {"prune": {"calibration": {"dataset": str(mine), "samples": 8, "sequence_length": 128}}}
    run(load_recipe(recipe_of(tiny_model("llama"), calibrated, text=others)), out=tmp_path / "first", device="cpu")
    run(load_recipe(recipe_of(tmp_path / "first", "bf16", text=others)), out=tmp_path / "second", device="cpu")
    for model, stages in ((tmp_path / "first", []), (tmp_path / "first", ["bf16"]), (tmp_path / "second", ["fp16"])):
        with pytest.raises(EvalError, match=r"edition.txt: \d+% of .*which the model was calibrated on"):
            run(load_recipe(recipe_of(model, *stages, text=edition)), out=tmp_path / "third", device="cpu")
    record = json.loads((tmp_path / "second" / "optkit.json").read_text(encoding="utf-8"))
    assert [Path(text["dataset"]).name for text in record["calibrated_on"]] == ["mine.txt"]
    assert "sketch" not in json.dumps(record["steps"])


def test_what_a_teacher_or_a_draft_was_calibrated_on_is_remembered(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher's texts for all evals, those of a draft for what asks it."""
    monkeypatch.setenv("OPTKIT_STORE", str(tmp_path / "store"))
    mine, others = tmp_path / "mine.txt", tmp_path / "others.txt"
    mine.write_text(made_up(6_000, seed=9), encoding="utf-8")
    others.write_text(made_up(6_000, seed=11), encoding="utf-8")
    calibrated = {"prune": {"calibration": {"dataset": str(mine), "samples": 8, "sequence_length": 128}}}
    model, first = tiny_model("llama"), tmp_path / "first"
    run(load_recipe(recipe_of(model, calibrated, text=others)), out=first, device="cpu")
    taught = {"distill": {"teacher": str(first), "texts": [{"dataset": "python-reference"}], "sequence_length": 32}}
    taught["distill"] |= {"tokens": 256, "batch_size": 4, "precision": "float32"}
    drafted = {"speculative": {"draft": str(first)}}
    asks = {"speculation": {"dataset": str(mine), "window": 16, "windows": 2, "new_tokens": 4, "isolated": False}}
    again = recipe_of(model, drafted, text=mine)
    again["evals"] = [asks]
    for recipe, who in ((recipe_of(model, taught, text=mine), "model"), (again, "draft")):
        with pytest.raises(EvalError, match=rf"the {who} was calibrated on"):
            run(load_recipe(recipe), out=tmp_path / "second", device="cpu")
    run(load_recipe(recipe_of(model, drafted, text=mine)), out=tmp_path / "third", device="cpu")  # asks no draft
    run(load_recipe(recipe_of(tmp_path / "third", "bf16", text=mine)), out=tmp_path / "fourth", device="cpu")
    texts = [json.loads((tmp_path / name / "optkit.json").read_text())["calibrated_on"] for name in ("third", "fourth")]
    assert [[text.get(DRAFT) for text in each] for each in texts] == [[DRAFT], []]


def test_an_artifact_whose_record_is_unreadable_is_no_source(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTKIT_STORE", str(tmp_path / "store"))
    run(
        load_recipe({"name": "x", "model": str(tiny_model("llama")), "stages": ["bf16"], "evals": ["footprint"]}),
        out=tmp_path / "a",
        device="cpu",
    )
    (tmp_path / "a" / "optkit.json").write_text("{half", encoding="utf-8")
    with pytest.raises(ArtifactError, match="optkit.json: cannot be read"):
        run(
            load_recipe({"name": "y", "model": str(tmp_path / "a"), "evals": ["footprint"]}),
            out=tmp_path / "b",
            device="cpu",
        )
