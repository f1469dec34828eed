"""A search: what it proposes, what it learns from, and what it cannot be asked for."""

import builtins
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from optkit.errors import MissingPackageError, RecipeError, UsageError
from optkit.measure import Metric
from optkit.recipe import matrix as matrices
from optkit.recipe.matrix import Combination, Matrix
from optkit.recipe.matrix_reading import load_matrix
from optkit.scorecard import Scorecard
from optkit.scorecard.scorecard import Measured
from optkit.sweep.executors.base import Order
from optkit.sweep.run import Sweep, sweep
from optkit.sweep.search import chosen
from tests.support.fresh_python import imported_by
from tests.support.remembered import Lines
from tests.support.sweeps import TIMED, Here, recipe

RECIPE = """\
name: tiny
model: smollm2-135m
stages:
  - rtn
evals:
  - footprint
  - perplexity: {dataset: python-reference, split: test, window: 64}
  - throughput: {batch_sizes: [1, 2], prompts: [8], new_tokens: 8}
gates: {decode_tokens_per_s: ">= 2x"}
matrix:
  stages.0.rtn.bits: [2, 3, 4, 8]
  stages.0.rtn.group_size: [16, 32, 64, 128]
  stages.0.rtn.symmetric: [true, false]
"""
Values = Callable[[Combination], dict[str, float] | None]


def measured(combination: Combination) -> dict[str, float]:
    """Return made-up numbers: fewer bits are worse and smaller."""
    values = {path.split(".")[-1]: value for path, value in combination.assignment.items()}
    bits, group = values["bits"], values["group_size"]
    loss = 8 / bits + group / 128 + 0.3 * values["symmetric"]
    return {"perplexity": 10 + loss, "size_bytes": (bits + 32 / group) * 1e6}


def card(values: dict[str, float]) -> Scorecard:
    rows = tuple(
        Measured(metric=Metric(name=name, value=value, unit="", higher_is_better=False, protocol="p"), ratio=value / 11)
        for name, value in values.items()
    )
    return Scorecard(name="s", artifact_key="k", created="", recipe={}, rows=rows)


KNOWN: dict[int, tuple[Matrix, Sequence[Combination]]] = {}


@pytest.fixture(autouse=True)
def _checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check all combinations of one matrix once: there are many searches here."""
    check = Matrix.combinations

    def once(self: Matrix, *_: int) -> Sequence[Combination]:
        if id(self) not in KNOWN:
            KNOWN[id(self)] = self, check(self)
        return KNOWN[id(self)][1]

    monkeypatch.setattr(Matrix, "combinations", once)


@cache
def matrix(text: str) -> Matrix:
    return load_matrix(text)


def found(
    trials: int | None, text: str = RECIPE, values: Values = measured, progress: Lines | None = None, **how: Any
) -> list[Combination]:
    asked: dict[str, Any] = {"sampler": "tpe", "seed": 0, "best": "perplexity", "axes": (), "require": ()} | how
    said = progress or Lines()
    first, search = chosen(matrix(text), trials=trials, progress=said, **asked)

    def told(combination: Combination) -> Scorecard | None:
        numbers = values(combination)
        return card(numbers) if numbers else None

    return [*first, *(search.proposed(told, said) if search else ())]


def names(combinations: list[Combination]) -> list[str]:
    return [each.name for each in combinations]


def test_a_search_proposes_the_same_again_and_more_trials_have_those_of_fewer() -> None:
    some = names(found(12))
    assert len(set(some)) == 12
    assert names(found(12)) == some
    assert names(found(8)) == some[:8]
    assert names(found(12, seed=1)) != some


def test_tpe_finds_what_is_best_sooner_than_chance() -> None:
    def best(sampler: str, seed: int) -> float:
        return min(measured(each)["perplexity"] for each in found(12, sampler=sampler, seed=seed))

    seeds = range(4)
    searched, drawn = (sum(best(sampler, seed) for seed in seeds) for sampler in ("tpe", "random"))
    assert searched < drawn


def test_what_breaks_a_limit_is_left_behind() -> None:
    def small(**how: Any) -> int:
        some = [each for seed in range(2) for each in found(12, seed=seed, **how)[5:]]
        return sum(measured(each)["size_bytes"] <= 4.2e6 for each in some)

    limit = {"require": ["size_bytes<=4.2e6"]}
    assert small(**limit) > small()
    gated = RECIPE.replace("gates: {", 'gates: {size_bytes: "<= 4.2e6", ')
    assert names(found(8, gated)) == names(found(8, **limit))


def test_nsga2_searches_along_several_metrics() -> None:
    how: dict[str, Any] = {"sampler": "nsga2", "best": None, "axes": ["perplexity", "size_bytes"]}
    some = names(found(20, **how))
    assert len(set(some)) == 20
    assert some == names(found(20, **how))
    assert some[:6] == names(found(6, **how))
    assert some != names(found(20, **{**how, "axes": ["perplexity", "weights_bytes"]}, values=lambda _: None))


def test_failures_and_missing_numbers_teach_nothing_and_end_nothing() -> None:
    blind = names(found(16, values=lambda _: None))
    assert len(set(blind)) == 16
    assert names(found(16, values=lambda each: {"size_bytes": 1.0})) == blind


def test_excluded_combinations_are_never_proposed_and_the_search_ends_when_there_are_no_others() -> None:
    text = RECIPE + "  exclude: [{stages.0.rtn.bits: 2}, {stages.0.rtn.bits: 3}]\n"
    some = found(20, text)
    assert len(some) == 16
    assert {each.assignment["stages.0.rtn.bits"] for each in some} == {4, 8}


def test_what_is_included_is_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optkit.recipe.matrix.MOST", 1)  # of fewer a repetition is refused at once
    text = RECIPE.replace("[2, 3, 4, 8]", "[3, 4]").replace("[16, 32, 64, 128]", "[32, 64]")
    text += "  include: [{stages.0.rtn.bits: 3, stages.0.rtn.group_size: 32}]\n"
    for seed in range(3):
        some = found(8, text, lambda _: {"perplexity": 1.0}, seed=seed)
        assert len({each.content for each in some}) == len(some) == 8


def test_what_is_included_is_made_first() -> None:
    some = names(found(6, RECIPE + "  include: [{stages.0: nf4}]\n"))
    assert some[0] == "nf4"
    assert len(set(some)) == 6


def test_few_are_all_made_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optkit.sweep.search._study", lambda *_: pytest.fail("a study was made"))
    assert names(found(32)) == names([*matrix(RECIPE).combinations()])
    assert names(found(4, sampler="grid")) == names(found(32))[:4]
    assert len(found(4, sampler=None)) == 4


MANY = f"{RECIPE}  seed: {[*range(400)]}\n"


def test_of_very_many_only_those_are_made_that_are_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    check = matrices.checked
    monkeypatch.setattr(matrices, "checked", lambda *given: read.append(1) or check(*given))
    assert load_matrix(MANY).size == 12_800
    assert len(found(10, MANY)) == 10
    assert len(read) < 420


def test_a_proposal_that_is_no_recipe_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said, check = Lines(), matrices.Matrix.combination

    def refusing(self: matrices.Matrix, values: matrices.Chosen) -> Combination:
        if values[0].value == 8:
            raise RecipeError([values[0].place.problem("8 is no more.")])
        return check(self, values)

    monkeypatch.setattr(matrices.Matrix, "combination", refusing)
    assert {each.assignment["stages.0.rtn.bits"] for each in found(12, progress=said)} <= {2, 3, 4}
    assert any(line.startswith("warning: a combination is left out: recipe:11:") for line in said.lines)


def test_every_value_of_very_many_is_checked_before_anything_is_made() -> None:
    with pytest.raises(
        RecipeError, match=r"recipe:11:32: bits: 7 is not one of 2, 3, 4, 5, 6, 8\. Combinations: bits7-"
    ):
        found(10, MANY.replace("4, 8]", "4, 7]"))


def test_a_limit_to_a_timing_is_for_the_choice_at_the_end() -> None:
    said = Lines()
    assert names(found(8, require=["decode_tokens_per_s>=2x"], progress=said)) == names(found(8))
    (line,) = said.lines
    assert line == "--require decode_tokens_per_s: a timing, by which is chosen at the end and not searched"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            {"trials": None},
            "--sampler tpe: it makes as many combinations as --trials says, and that says nothing. Add --trials 40.",
        ),
        ({"sampler": "TPE"}, "sweep: 'TPE' is no sampler. Take one of grid, random, tpe, nsga2."),
        ({"best": None}, "--sampler tpe: it searches for one metric, and none is named. Add --best perplexity."),
        (
            {"sampler": "nsga2", "axes": ["perplexity", "perplexity"]},
            "--sampler nsga2: it searches along two metrics or more, and 1 is named. Add --axis perplexity --axis "
            "size_bytes.",
        ),
        (
            {"sampler": "nsga2"},
            "--sampler nsga2: it searches along two metrics or more, and none is named. Add --axis perplexity --axis "
            "size_bytes.",
        ),
        ({"best": "perplexty"}, "--best: no eval of the recipe measures 'perplexty'. Did you mean 'perplexity'?"),
        ({"best": "perplexity[batch=1]"}, "--best: 'perplexity' has one row, and no labels to pick it by."),
        ({"best": "5"}, "--best: '5' names no metric. Write a name, or name[batch=1,prompt=128] to pick rows."),
        ({"require": ["size<=3"]}, "--require: no eval of the recipe measures 'size'."),
        (
            {"best": "decode_tokens_per_s"},
            "--best: 'decode_tokens_per_s' is a timing. A sweep takes its timings last, when nothing else runs, so "
            "that no search can learn from them. Name what is measured with each artifact: size_bytes, perplexity.",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused(how: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        found(**{"trials": 4, **how})
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("trials", [None, 4])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"best": "size"}, "--best: no eval of the recipe measures 'size'."),
        ({"axes": ["perplexty"]}, "--axis: no eval of the recipe measures 'perplexty'. Did you mean 'perplexity'?"),
        ({"require": ["perplexity[a=1]<2"]}, "--require: 'perplexity' has one row, and no labels to pick it by."),
    ],
)
def test_a_name_is_refused_before_anything_is_made(how: dict[str, Any], said: str, trials: int | None) -> None:
    with pytest.raises(UsageError) as error:
        found(trials, **{"sampler": None, "best": None, **how})
    assert str(error.value).startswith(said)


def test_a_metric_of_several_rows_needs_its_labels() -> None:
    text = RECIPE.replace("window: 64}", "window: 64, also: [{dataset: python-reference, split: train}]}")
    with pytest.raises(UsageError, match=r"--best: 'perplexity' has 2 rows\. Name one of them: perplexity"):
        found(4, text)


def test_without_the_package_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = builtins.__import__

    def without(name: str, *given: Any, **more: Any) -> Any:
        if name == "optuna":
            raise ImportError(name)
        return known(name, *given, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackageError) as error:
        found(4)
    assert str(error.value) == (
        "--sampler tpe: the package `optuna` is not installed. Run: pip install 'optkit[sweep]'."
    )


def test_nobody_else_imports_it() -> None:
    there = imported_by("import optkit.sweep.run, optkit.sweep.plan, optkit_cli.sweep, optkit_cli.plan")
    assert "optkit.sweep.search" in there
    assert not there & {"optuna", "sqlalchemy", "torch"}


class Desk:
    """A directory in which one search is run again and again."""

    def __init__(self, home: Path, model: Path, text: Path) -> None:
        self.home = home
        asked = recipe(model, text, matrix={"stages.1.rtn.bits": [2, 3, 4, 8], "stages.1.rtn.group_size": [16, 32, 64]})
        asked["evals"].append(TIMED)
        (home / "s.json").write_text(json.dumps(asked))

    def run(self, executor: Here, out: str = "s", **how: Any) -> Sweep:
        places = {"out": self.home / out, "store": self.home / "store", "device": "cpu"}
        search = {"trials": 4, "sampler": "tpe", "best": "perplexity"}
        return sweep(self.home / "s.json", executor=executor, **{**places, **search, **how})


@pytest.fixture
def desk(tmp_path: Path, tiny_model: Any, letters: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(Sweep, "_time", lambda self: None)
    monkeypatch.setattr("optkit.sweep.search.STARTUP", 2)
    return Desk(tmp_path, tiny_model("llama"), letters)


def test_a_search_that_was_killed_goes_on_with_the_same_trials(desk: Desk) -> None:
    whole = Here()
    done = desk.run(whole, out="whole")
    assert len(done.record.entries) == done.record.total == 4
    assert whole.made == [entry.name for entry in done.record.entries]

    def killed(order: Order) -> None:
        if order.name == whole.made[2]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        desk.run(Here(killed))
    rest = Here()
    assert [entry.name for entry in desk.run(rest).record.entries] == whole.made
    assert rest.made == whole.made[2:]
    more = Here()
    assert len(desk.run(more, trials=5).record.entries) == 5
    assert len(more.made) == 1


def test_what_waits_of_a_search_is_counted(desk: Desk) -> None:
    done = desk.run(Here(), max_hours=1e-9)
    assert (len(done.record.entries), done.record.total) == (1, 4)
    assert desk.run(Here(), trials=1).record.total == 1


def test_a_search_with_nothing_left_says_so(desk: Desk) -> None:
    said = Lines()
    excluded = {"exclude": [{"stages.1.rtn.bits": bits} for bits in (2, 3, 8)]}
    asked = json.loads((desk.home / "s.json").read_text())
    asked["matrix"] |= excluded
    (desk.home / "s.json").write_text(json.dumps(asked))
    done = desk.run(Here(), progress=said)
    assert (len(done.record.entries), done.record.total) == (3, 3)
    assert "the search ends: there are no other combinations than these 3" in said.lines
