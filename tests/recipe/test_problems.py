"""What is wrong in a recipe is told at once, in sentences, each with its place."""

import pytest

from optkit.errors import Problem, RecipeError
from optkit.recipe.recipe import load_recipe
from tests.support.recipe_stand_ins import GOOD, Score, Speed, one_problem, problems_of, register_stand_ins


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    register_stand_ins(monkeypatch)


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
        "recipe:6:5: 2 keys stand side by side: shrink, bits. Write `- name: {field: value}`, with the "
        "fields indented below the name and each stage after its own `- `.",
        "recipe:8:5: 'speed' is one of the evals. Move it below `evals:`.",
        "recipe:9:5: this is 4. Write the name of a stage, or `name: {field: value}`.",
        "recipe:10:5: this mapping is empty. Write `- name: {field: value}`, with the fields indented "
        "below the name and each stage after its own `- `.",
        "recipe:12:12: the field 'dataset' is missing. It is: A built-in name (`python-reference`, "
        "`wikitext2`, `c4`), ",
        "recipe:13:22: unknown data set 'python-refrence'. Did you mean 'python-reference'?",
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
        ("- a\n- b\n", "recipe:1:1: a recipe is a mapping of name, description, model, seed, attribution, stages, "
                       "evals, gates, not [\"a\", \"b\"]."),
        ("model: x/y\n", "recipe:1:1: the recipe has no stages and no evals: there is nothing to do. List some."),
        ("model: 5\nevals: [speed]\n", "recipe:1:8: model: a model is a name, as smollm2-135m, or a mapping of "),
        ("model:\nevals: [speed]\n", "recipe:1:1: model: a model is a name, as smollm2-135m, or a mapping of "),
        ("model: x/y\nname: "
         "a/b\nevals: [speed]\n", "recipe:2:7: name: 'a/b' is not the name of a directory: "),
        ("model: x/y\nevals: 4\n", "recipe:2:8: evals are a list: begin each with `- `. This is 4."),
        ("model: x/y\nevals: "
         "[speed]\ngates: [a]\n", "recipe:3:8: gates are a mapping like `perplexity: \"<= 1.10x\"`, not [\"a\"]."),
        ("model: x/y\nstages: [halve: 4]\n", "recipe:2:17: halve takes a mapping of its fields (by), not 4."),
        ("model: x/y\nstages: "
         "[major: {key: minor}]\n", "recipe:2:10: 'major' is a preset and takes no fields. Write `- major`."),
        ("model: x/y\nstages: "
         "[shrink: {bits: '4'}]\n", "recipe:2:25: bits: '4' is not one of 2, 3, 4, 8. Remove the quotes."),
        ("model: x/y\nstages: [shrink: {bits: }]\n", "recipe:2:19: bits: nothing is not one of 2, 3, 4, 8."),
        ("model: x/y\nstages: [halve: {by: true}]\n", "recipe:2:22: by: true is not a whole number."),
        ("model: x/y\nstages: [halve: {by: 1.5}]\n", "recipe:2:22: by: 1.5 is not a whole number."),
        ("model: x/y\nstages: [halve: {by: 13}]\n", "recipe:2:17: halve: thirteen is not allowed."),
        ("model: x/y\nstages: [shrink: {include: a}]\n", "recipe:2:28: include: 'a' is not a list."),
        ("model: x/y\nstages: [shrink: {include: [a, 3]}]\n", "recipe:2:32: include.1: 3 is not text."),
        ("model: x/y\nstages: [shrink: "
         "{calibration: {dataset: c4, samples: 0}}]\n", "recipe:2:55: calibration.samples: 0 is not at least 1."),
        ("model: x/y\nstages: [shrink: {calibration: {dataset: "
         "c4, smples: 9}}]\n", "recipe:2:46: unknown field 'calibration.smples'. Did you mean 'samples'?"),
        ("model: x/y\nstages: [shrink: "
         "{prune: [{patern: a}]}]\n", "recipe:2:28: unknown field 'prune.0.patern'. Did you mean 'pattern'?"),
        ("model: x/y\nevals: [score: {dataset: c4, split: tes}]\n", "'c4' has no split 'tes'."),
        ("model: x/y\nevals: [speed]\ngates: {score: '< 3'}\n", "recipe:3:9: no eval of the recipe measures 'score'. "
                             "Write `- score` below `evals:`."),
        ("model: x/y\nstages: "
         "[halve]\ngates: {scr: '< 3'}\n", "recipe:3:9: no eval measures 'scr': the recipe has no evals."),
        ("model: x/y\nevals: "
         "[speed, speed]\n", "recipe:2:16: the eval speed is here twice with the same fields. Remove one of them."),
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
        "recipe:5:5: halve reads a checkpoint with float weights and shrink leaves one with packed "
        "weights. Put halve before shrink."
    )
    assert one_problem("model: x/y\nstages:\n  - shrink\n  - shrink: {bits: 8}\n") == (
        "recipe:4:5: shrink reads a checkpoint with float weights and shrink leaves one with "
        "packed weights. Keep one of them."
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


def test_a_key_that_is_there_twice_hides_no_other_problem():
    with pytest.raises(RecipeError) as caught:
        load_recipe("model: a/b\nmodel: c/d\nseed: .inf\nevals: [spead]\nsed: 1\n")
    assert [(problem.line, problem.message.split(".")[0]) for problem in caught.value.problems] == [
        (2, "the key 'model' is here twice, first in line 1"),
        (3, ""),
        (4, "unknown eval 'spead'"),
        (5, "unknown key 'sed'"),
    ]


@pytest.mark.parametrize(
    ("gate", "problem"),
    [
        ("score[batch=1]", "'score' has one row, and no labels to pick it by. Write score alone."),
        ("tokens_per_s[batch=3]", "no row of 'tokens_per_s' has batch=3. There will be: batch=1, batch=4."),
        ("tokens_per_s[bach=1]", "the rows of 'tokens_per_s' have no label 'bach'. Did you mean 'batch'?"),
        ("tokens_per_s[batch=1,new=2]", "the rows of 'tokens_per_s' have no label 'new'. Known: batch, prompt."),
        ("tokens_per_s[batch=4,prompt=256]", "no row of 'tokens_per_s' has prompt=256. There will be: prompt=128."),
    ],
)
def test_a_gate_that_no_row_can_match(gate: str, problem: str) -> None:
    text = "model: x/y\nevals:\n  - score: {dataset: c4}\n  - speed: {batch_sizes: [1, 4]}\ngates:\n  score: '< 9'\n"
    assert one_problem(f"{text}  '{gate}': '< 3'\n") == f"recipe:7:3: {problem}"


def test_labels_that_no_row_has_together() -> None:
    text = "model: x/y\nevals:\n  - speed: {batch_sizes: [1]}\n  - speed: {batch_sizes: [4], prompt: 256}\ngates:\n"
    assert one_problem(text + "  tokens_per_s[batch=1,prompt=256]: '< 3'\n") == (
        "recipe:6:3: no row of 'tokens_per_s' has these labels together."
        " There will be: tokens_per_s[batch=1,prompt=128], tokens_per_s[batch=4,prompt=256]."
    )
    assert load_recipe(text + "  tokens_per_s[batch=4,prompt=256]: '< 3'\n").gates


def test_one_bad_eval_hides_no_problem_of_gates_stages_and_texts() -> None:
    text = """\
model: x/y
stages:
  - shrink: {bit: 4}
  - halve
evals:
  - score: {dataset: c4, windo: 3}
  - speed: {batch_sizes: [1]}
gates:
  score[batch=1]: "< 3"
  scores: "< 3"
  tokens_per_s[batch=2]: "> 3"
"""
    assert problems_of(text) == [
        "recipe:3:14: unknown field 'bit'. Did you mean 'bits'?",
        "recipe:4:5: halve reads a checkpoint with float weights and shrink leaves one with packed "
        "weights. Put halve before shrink.",
        "recipe:6:26: unknown field 'windo'. Did you mean 'window'?",
        "recipe:10:3: no eval of the recipe measures 'scores'. Did you mean 'score'?",
        "recipe:11:3: no row of 'tokens_per_s' has batch=2. There will be: batch=1.",
    ]


def test_a_misspelled_eval_may_be_what_a_gate_is_about() -> None:
    text = "model: x/y\nevals: [scor: {dataset: c4}, speed]\ngates: {score: '< 3', tokens: '> 3'}\n"
    assert problems_of(text) == [
        "recipe:2:9: unknown eval 'scor'. Did you mean 'score'?",
        "recipe:3:23: no eval of the recipe measures 'tokens'. Did you mean 'tokens_per_s'?",
    ]


def test_a_gate_beside_a_bad_eval_still_names_the_eval_that_is_not_listed() -> None:
    told = problems_of("model: x/y\nevals: [speed: {batches: 3}]\ngates: {score: '< 3'}\n")
    assert told[1] == "recipe:3:9: no eval of the recipe measures 'score'. Write `- score` below `evals:`."


def test_a_gate_names_every_eval_that_would_measure_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speed, "metrics", Score.metrics)
    assert problems_of("model: x/y\nstages: [halve]\ngates: {score: '< 3'}\n") == [
        "recipe:3:9: no eval of the recipe measures 'score'. Write `- score` or `- speed` below `evals:`."
    ]


def test_two_bad_evals_are_not_called_the_same() -> None:
    assert len(problems_of("model: x/y\nevals: [speed: {a: 1}, speed: {b: 2}]\n")) == 2


@pytest.mark.parametrize(("said", "shown"), [("raise it, or add one", "raise it, or add one."), ("why?", "why?")])
def test_what_a_field_says_ends_as_a_sentence(said: str, shown: str) -> None:
    assert str(Problem(said, "recipe", 3)) == f"recipe:3: {shown}"
