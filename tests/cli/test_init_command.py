"""`optkit init`: from answers to a recipe on disk, with its cost; mistakes are told."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from optkit_cli import init
from optkit_cli.main import main

from optkit.recipe.recipe import load_recipe


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working directory with a store of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPTKIT_STORE", str(tmp_path / "store"))
    return tmp_path


def test_what_nobody_says_is_the_usual_and_the_cost_is_told(
    here: Path, tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--model", str(tiny_model("llama")), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("recipe.yaml: INT4 for vLLM on CPUs.\n1 of 2 steps and 4 of 4 evals to do, ")
    assert out.endswith("optkit run recipe.yaml\n")
    assert [entry.kind for entry in load_recipe(here / "recipe.yaml").stages] == ["rtn", "attention"]


def test_for_llama_cpp_it_writes_a_gguf(here: Path, tiny_model: Callable[[str], Path]) -> None:
    given = ["init", "--model", str(tiny_model("llama")), "--device", "cpu", "--target", "llama.cpp"]
    assert main([*given, "--effort", "thorough"]) == 0
    assert [entry.kind for entry in load_recipe(here / "recipe.yaml").stages] == ["gptq", "gguf"]


def test_the_form_that_loses_least_and_fits_is_taken(
    here: Path, tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["init", "--model", str(tiny_model("llama")), "--target", "transformers", "--device", "cpu", "--force"]
    kinds = {}
    for size in ("0.9x", "300kB", "240kB", "225kB"):
        assert main([*given, "--size", size]) == 0
        entry = load_recipe(here / "recipe.yaml").stages[0]
        kinds[size] = entry.value.bits, entry.value.group_size
    # 204 kB of weights in groups of 32 would fit into 225 without the tokenizer
    assert kinds == {"0.9x": (8, 64), "300kB": (8, 64), "240kB": (4, 32), "225kB": (4, 64)}
    assert main([*given, "--size", "1kB"]) == 2
    said = capsys.readouterr().err
    assert "--size 1kB: no form that transformers opens on cpu is so small. The smallest is INT" in said
    assert "Take a larger size" in said


def test_a_form_that_a_model_takes_is_taken_and_one_that_is_refused_is_not_the_smallest(
    here: Path, tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["init", "--model", str(tiny_model("mixtral")), "--device", "cpu"]
    assert main(given) == 0
    assert load_recipe(here / "recipe.yaml").stages[0].value.symmetric
    assert main([*given, "there.yaml", "--size", "1kB"]) == 2
    assert re.search(r"The smallest is INT4, groups of 64, \d+ kB \(0\.\d\dx\)\.", capsys.readouterr().err)


def test_a_model_that_takes_no_form_is_told_what_the_first_one_lacks(
    here: Path, tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_model("gpt2"))
    assert main(["init", "--model", model, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert f"error: --model {model}: no recipe of init is for this model. rtn.format: 8 layers are" in said
    assert said.endswith("Set format: gptq. Start from a recipe of `optkit list recipes`, and set that there.\n")
    assert not (here / "recipe.yaml").exists()


def test_the_recipe_names_its_file_where_it_is_to_be_typed(here: Path, tiny_model: Callable[[str], Path]) -> None:
    given = ["init", "new/my int4.yaml", "--model", str(tiny_model("llama")), "--device", "cpu"]
    assert main([*given, "--effort", "thorough"]) == 0
    text = (here / "new" / "my int4.yaml").read_text(encoding="utf-8")
    assert "#   optkit run 'my int4.yaml'  " in text
    assert "(`dataset: FILE.jsonl`)" in text


def test_on_a_terminal_it_asks_for_what_no_option_says(
    here: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "at_terminal", lambda: True)
    answers = f"{tiny_model('llama')}\nonnx\nnonsense\ncpu\nthorough\n"
    done = CliRunner().invoke(init.command, ["mine.yaml", "--size", "0.9x"], input=answers)
    assert done.exit_code == 0, done.output
    assert "'nonsense' is not one of 'cpu', 'cuda'" in done.output
    assert [entry.kind for entry in load_recipe(here / "mine.yaml").stages] == ["onnx"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["there.yaml"], "there.yaml: there is a file of this name. Name another, or add --force."),
        (
            ["--size", "2x"],
            "1000 to 1e+15. A part of the unmodified model is 0.3x.",
        ),
        (["--size", "0x"], "'0x' is no size."),
        (["--model", "all-minilm-l6-v2"], "--model all-minilm-l6-v2: no recipe of init is for this model. "),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(
    words: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "there.yaml").write_text("mine", encoding="utf-8")
    assert main(["init", "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in here.glob("*.yaml")] == ["there.yaml"]
    assert (here / "there.yaml").read_text(encoding="utf-8") == "mine"
