"""What an eval needs is checked before anything is computed, and an artifact whose run did not
finish says so and is refused.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from optkit_cli.main import main
from optkit_evals.perplexity import Perplexity

from optkit import pipeline
from optkit.artifact import read_artifact
from optkit.comparison import compare
from optkit.errors import ArtifactError, EvalError, OptkitError, SourceError
from optkit.recipe.recipe import Recipe, load_recipe

PERPLEXITY = {"dataset": "python-reference", "split": "test", "window": 32, "windows": 4}


def recipe(model: Path, **fields: object) -> Recipe:
    return load_recipe(
        {"name": "r", "model": str(model), "stages": ["bf16"], "evals": [{"perplexity": PERPLEXITY | fields}]}
    )


def nothing_ran(tmp_path: Path) -> bool:
    return not (tmp_path / "out").exists() and not (tmp_path / "store" / "steps").exists()


def run(model: Path, tmp_path: Path, **fields: object) -> None:
    pipeline.run(recipe(model, **fields), out=tmp_path / "out", store=tmp_path / "store", device="cpu")


def break_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{", encoding="utf-8")


def empty_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("[]", encoding="utf-8")


def break_its_config(model: Path) -> None:
    (model / "tokenizer_config.json").write_text("{", encoding="utf-8")


def lose_tokenizer(model: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()
    (model / "special_tokens_map.json").unlink(missing_ok=True)


def raise_ids(model: Path) -> None:
    path = model / "tokenizer.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    said["model"]["vocab"] = {token: index + 100 for token, index in said["model"]["vocab"].items()}
    said["added_tokens"] = [token | {"id": token["id"] + 100} for token in said["added_tokens"]]
    path.write_text(json.dumps(said), encoding="utf-8")


@pytest.mark.parametrize("damage", [break_tokenizer, empty_tokenizer, break_its_config, lose_tokenizer, raise_ids])
def test_a_tokenizer_that_does_not_serve_is_found_before_anything_runs(
    damage: Callable[[Path], None], model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    damage(model)
    with pytest.raises(SourceError):
        run(model, tmp_path)
    assert nothing_ran(tmp_path)
    if damage is not break_its_config:  # which transformers alone would read, and a plan does not import it
        with pytest.raises(SourceError):
            pipeline.plan(recipe(model), store=tmp_path / "store", device="cpu")


def test_ids_beyond_the_vocabulary_are_named(model: Path, tmp_path: Path) -> None:
    raise_ids(model)
    with pytest.raises(
        SourceError, match=r"json: the tokenizer makes token 6\d\d of .*, and the model's vocabulary ends at 511"
    ):
        run(model, tmp_path)


@pytest.mark.parametrize("fields", [{"windows": 1_000_000}, {"dataset": "short.txt", "split": "all"}])
def test_a_text_that_is_too_short_is_found_before_anything_runs(
    fields: dict[str, object], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("a b c", encoding="utf-8")
    with pytest.raises(
        EvalError, match=r"the text has [\d,]+ windows of 32 tokens and [\d,]+ are needed. Lower windows or window"
    ):
        pipeline.plan(recipe(model, **fields), store=tmp_path / "store", device="cpu")
    with pytest.raises(EvalError, match="the text has"):
        run(model, tmp_path, **fields)
    assert nothing_ran(tmp_path)


def test_a_recipe_without_stages_is_checked_too(model: Path, tmp_path: Path) -> None:
    bare = recipe(model, windows=1_000_000).model_copy(update={"stages": ()})
    with pytest.raises(EvalError, match="the text has"):
        pipeline.run(bare, out=tmp_path / "out", store=tmp_path / "store", device="cpu")
    assert nothing_ran(tmp_path)


def test_what_was_measured_is_not_read_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(model, tmp_path)
    monkeypatch.setattr(Perplexity, "check_texts", lambda *_: pytest.fail("its numbers are in the store"))
    run(model, tmp_path)


def test_an_artifact_whose_run_did_not_finish_is_refused_until_it_has(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise EvalError("it failed", where="perplexity")

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Perplexity, "run", fail)
        with pytest.raises(EvalError, match="it failed"):
            run(model, tmp_path)
    assert read_artifact(out).record.finished is False
    weights = {path.name: path.stat().st_ino for path in out.glob("*.safetensors")}
    for use in (pipeline.open_artifact, pipeline.read_scorecard, pipeline.verify, lambda path: compare([path])):
        with pytest.raises(ArtifactError, match=r"its run did not finish\. .* Run its recipe again"):
            use(out)
    for words in (
        ["show", str(out)],
        ["compare", str(out), str(out)],
        ["verify", str(out)],
        ["eval", str(out), "--evals", "baseline"],
    ):
        assert main(words) == 1
        assert f"error: {out}: its run did not finish." in capsys.readouterr().err

    run(model, tmp_path)
    assert read_artifact(out).record.finished is True
    found = {path.name: path.stat().st_ino for path in out.glob("*.safetensors")}
    assert found == weights, "it went on from what was there"
    assert main(["show", str(out)]) == 0


def test_too_few_sentences_are_found_before_anything_runs(
    tiny_encoder_source: Callable[[str], Path], tmp_path: Path
) -> None:
    embedding = {"dataset": "python-reference", "sentences": 1_000_000}
    stages = [{"onnx": {"exporter": "torch"}}]
    asked = load_recipe(
        {
            "name": "r",
            "model": str(tiny_encoder_source("BertModel")),
            "stages": stages,
            "evals": [{"embedding": embedding}],
        }
    )
    for use in (pipeline.plan, lambda *args, **kwargs: pipeline.run(*args, **kwargs, out=tmp_path / "out")):
        with pytest.raises(OptkitError, match=r"different sentences and 1,000,000 are asked for"):
            use(asked, store=tmp_path / "store", device="cpu")
    assert nothing_ran(tmp_path)
