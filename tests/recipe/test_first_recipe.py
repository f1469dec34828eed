"""First recipes: every answer gives one that is valid, keeps to what its target opens, and runs."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

import optkit
from optkit.recipe.first_recipe import FORMS, OPENED, Answers
from optkit.recipe.recipe import load_recipe
from optkit.recipe.yaml_places import read_yaml

MODEL = "smollm2-135m"
ANSWERS = [
    Answers(*place, effort, MODEL, size) for place, effort, size in product(OPENED, ("quick", "thorough"), ("", "0.3x"))
]


@pytest.mark.parametrize("answers", ANSWERS, ids=lambda each: f"{each.target}-{each.device}-{each.effort}-{each.size}")
def test_every_answer_gives_recipes_that_are_valid(answers: Answers) -> None:
    forms = list(answers.forms())
    assert forms
    for form in forms:
        recipe = load_recipe(answers.recipe(form, "recipe.yaml"))
        kinds = [entry.kind for entry in recipe.stages]
        assert kinds[-1] == {"onnx": "onnx", "llama.cpp": "gguf"}.get(answers.target, kinds[-1])
        assert ("attention" in kinds) == (answers.target in ("vllm", "transformers"))
        assert recipe.gates["size_bytes"] == f"<= {answers.size or form.size + 'x'}"
        assert max(map(len, answers.recipe(form, "recipe.yaml").splitlines())) <= 112


def test_every_form_is_opened_by_somebody() -> None:
    assert {name for names in OPENED.values() for name in names} == FORMS.keys()


@pytest.mark.parametrize("model", ["org/model", "./here", "/a/b c", "true", "x: y", "smollm2-135m", "a.gguf"])
def test_the_model_is_the_one_that_was_named(model: str) -> None:
    answers = Answers("vllm", "cpu", "quick", model)
    form = next(answers.forms())
    assert read_yaml(answers.recipe(form, "recipe.yaml"), "").data["model"] == model


@pytest.mark.parametrize(
    ("target", "effort", "form"), [("vllm", "quick", "INT4"), ("transformers", "thorough", "INT3")]
)
def test_it_runs(
    target: str, effort: str, form: str, tiny_model: Callable[[str], Path], letters: Path, tmp_path: Path
) -> None:
    answers = Answers(target, "cpu", effort, str(tiny_model("llama")), "0.3x")
    overrides = ["evals=[footprint]", "gates={}", "attribution=false"]
    if effort == "thorough":
        overrides.append(f"stages.1.gptq.calibration={{dataset: {letters}, samples: 4, sequence_length: 32}}")
    recipe = load_recipe(answers.recipe(FORMS[form], "recipe.yaml"), overrides)
    made = optkit.run(recipe, out=tmp_path / "out", store=tmp_path / "store", device="cpu")
    (size,) = [row for row in made.rows if row.metric.name == "size_bytes"]
    assert size.ratio is not None
    assert size.ratio < 1
