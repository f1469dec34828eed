"""Tasks in recipes: which are refused at their line, and the gates that name them."""

import sys

import pytest

from optkit.errors import MissingPackageError, RecipeError
from optkit.recipe.recipe import load_recipe

pytest.importorskip("lm_eval")

from optkit_evals.lm_eval import LmEval

RECIPE = """model: smollm2-135m
evals:
  - lm_eval:
      tasks: {tasks}
gates:
{gates}
"""


def problems(tmp_path, tasks="[arc_easy]", gates="  {}") -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(tasks=tasks, gates=gates))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tasks", "place", "told"),
    [
        ("[piqa, arc_eesy]", "4:21", "no task is named 'arc_eesy'. Did you mean 'arc_easy'?"),
        ("[qqqqqqq]", "4:15", "The harness knows 1"),
        ("[mmlu, mmlu_anatomy]", "4:21", "'mmlu_anatomy' is in 'mmlu' already. Name it once."),
        ("[./no.yaml]", "4:15", "there is no file no.yaml. A path counts from the directory in which optkit runs"),
        ("[piqa, piqa]", "4:14", "is here twice. Write it once."),
        ("[]", "4:14", ""),
    ],
)
def test_tasks_that_are_none_are_refused_at_their_line(tmp_path, tasks, place, told):
    said = problems(tmp_path, tasks)
    assert f"recipe.yaml:{place}: " in said
    assert told in said


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("dataset_path: json\n", "names no `task:`"),
        ("- a\n", "is no mapping"),
        ("task: [\n", "is no task definition of the harness"),
        ("include: broken.yaml\n", "includes itself"),
    ],
)
def test_a_definition_that_is_none_is_refused(tmp_path, text, told):
    (tmp_path / "broken.yaml").write_text(text)
    assert told in problems(tmp_path, f"[{tmp_path}/broken.yaml]")


def test_gates_name_tasks_by_labels_or_dots(tmp_path):
    path = tmp_path / "recipe.yaml"
    gates = ['acc_norm[task=arc_easy]: ">= 0.99x"', 'lm_eval.piqa.acc: ">= 0.9x"', 'recovery: ">= 99"']
    gates += ['lambada_openai.task_perplexity: "<= 1.1x"', 'right_to_wrong[task=piqa]: "<= 20"']
    path.write_text(
        RECIPE.format(tasks="[arc_easy, piqa, lambada_openai]", gates="".join(f"  {gate}\n" for gate in gates))
    )
    assert len(load_recipe(path).gates) == 5


@pytest.mark.parametrize(
    ("gate", "told"),
    [
        ('acc_norm[task=lambada_openai]: ">= 0.9x"', "no row of 'acc_norm' has task=lambada_openai"),
        ('arc_esy.acc: ">= 0.9x"', "no row of 'acc' has task=arc_esy. There will be: task=arc_easy"),
        ('arc_easy.f1: ">= 0.9x"', "no eval of the recipe measures 'f1'"),
        ('recovery: ">= 0.99x"', "'recovery' compares with the baseline already. Give its limit without x"),
        ('arc_easy.acc: ">= 99"', "'acc' is a share between 0 and 1, so that nothing can pass >= 99"),
    ],
)
def test_gates_that_nothing_measures_are_refused(tmp_path, gate, told):
    assert told in problems(tmp_path, "[arc_easy, lambada_openai]", f"  {gate}")


def test_a_harness_that_is_not_installed_is_said_at_its_line_and_before_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("optkit_evals.harness.names.find_spec", lambda name: None)
    assert "4:14: lm_eval: the package `lm_eval` is not installed. Run: pip install 'optkit[lm-eval]'." in problems(
        tmp_path
    )
    with pytest.raises(MissingPackageError, match="lm_eval"):
        LmEval(tasks="arc_easy").check("cpu")
    plain = {"model": "smollm2-135m", "evals": [{"lm_eval": {"tasks": ["hellaswag"]}}], "gates": {"acc": ">= 0.5"}}
    assert load_recipe(plain).evals  # an artifact's recipe is read where the harness is not


def test_a_recipe_is_validated_without_torch(tmp_path):
    import subprocess

    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(tasks="[arc_easy, hellaswag]", gates='  acc: ">= 0.3"'))
    code = "import sys; from optkit.recipe.recipe import load_recipe as load; load(sys.argv[1])"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
