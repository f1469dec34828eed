"""`--sampler tpe` and `nsga2`: Optuna proposes each recipe, from what those before it measured.

A search keeps nothing but its seed. After a stop it asks for the same recipes again, and hears of
them what their scorecards say.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from optkit.comparison.choice import parse_metric, parse_requirement
from optkit.errors import RecipeError, UsageError, needing
from optkit.measure import Eval
from optkit.progress import Progress
from optkit.recipe.gates import Gate, check_named, metric_key, parse_gate
from optkit.recipe.matrix import Combination, Matrix
from optkit.recipe.recipe import Recipe
from optkit.scorecard import Scorecard

if TYPE_CHECKING:
    from optuna.trial import Trial

TPE, NSGA2 = "tpe", "nsga2"
SAMPLERS = ("grid", "random", TPE, NSGA2)
STARTUP = 5
"""Recipes that tpe draws before it learns. Best quantile of 240 after 12 trials, mean of 15 landscapes:
0.020 with 5, 0.058 with Optuna's 10, 0.092 drawn at random.
"""
POPULATION = 6
"""Recipes of a generation of nsga2: with Optuna's 50 the first ones would all be drawn at random."""
ASKED, DRAWN = 32, 10_000
"""How often Optuna is asked for a recipe that is new, and then how often one is drawn."""

Places = tuple[int, ...]


@dataclass(frozen=True)
class Search:
    """What is searched, and for what."""

    matrix: Matrix
    sampler: str
    trials: int
    seed: int
    objectives: tuple[Gate, ...]
    """Each names one row of a scorecard; a limit has no meaning."""
    limits: tuple[Gate, ...]
    """What must hold beside the recipe's own gates."""
    made: frozenset[str] = frozenset()
    """What combinations do that are made in any case."""

    def proposed(
        self, scorecard_of: Callable[[Combination], Scorecard | None], progress: Progress
    ) -> Iterator[Combination]:
        """Yield so many different combinations as there are trials, fewer if there are no others.
        `scorecard_of` is asked for each when the next one is wanted; None if it has failed.
        """
        from optuna.trial import TrialState

        study, draw, seen = (
            _study(self.sampler, self.seed, len(self.objectives)),
            random.Random(self.seed),
            set[Places](),
        )
        made = 0
        while made < self.trials and (found := self._next(study, draw, seen)):
            trial, places = found
            seen.add(places)
            try:
                combination = self.matrix.combination(self.matrix.placed(places))
            except RecipeError as error:
                progress.warn(f"a combination is left out: {error}")
                study.tell(trial, state=TrialState.FAIL)
                continue
            if combination.content in self.made:
                study.tell(trial, state=TrialState.FAIL)
                continue
            yield combination
            made += 1
            scorecard = scorecard_of(combination)
            values = scorecard and self._told(scorecard, combination.recipe, trial)
            study.tell(trial, values or None, None if values else TrialState.FAIL)

    def _next(self, study: Any, draw: random.Random, seen: set[Places]) -> tuple[Trial, Places] | None:
        """Return the next trial with the place of its value on each axis; None if all are known.
        One that is known already teaches nothing, and is asked for again.
        """
        from optuna.distributions import CategoricalDistribution
        from optuna.trial import TrialState

        axes = self.matrix.axes
        space = {axis.path: CategoricalDistribution(range(len(axis.values))) for axis in axes}

        def is_new(places: Places) -> bool:
            return places not in seen and not self.matrix.is_excluded(self.matrix.placed(places))

        for _ in range(ASKED):
            trial = study.ask(space)
            if is_new(places := tuple(trial.params[axis.path] for axis in axes)):
                return trial, places
            study.tell(trial, state=TrialState.FAIL)
        for _ in range(DRAWN):
            if is_new(places := tuple(draw.randrange(len(axis.values)) for axis in axes)):
                study.enqueue_trial(dict(zip(space, places, strict=True)))
                return study.ask(space), places
        return None

    def _told(self, scorecard: Scorecard, recipe: Recipe, trial: Trial) -> list[float] | None:
        """Return what is to be small, after the trial has heard of the limits.
        None if something was not measured.
        """
        gates = [parse_gate(key, text) for key, text in recipe.untimed().gates.items()]
        for name, gate in {f"{each.key} {each.text}": each for each in (*gates, *self.limits)}.items():
            numbers = [row.number(gate.of) for row in scorecard.rows if gate.matches(row.metric)]
            if not numbers or None in numbers:
                return None
            trial.set_constraint(name, max(gate.excess(each.value) for each in numbers if each))
        found = [_named(scorecard, each) for each in self.objectives]
        return [each for each in found if each is not None] if None not in found else None


def chosen(
    matrix: Matrix,
    sampler: str | None,
    trials: int | None,
    seed: int,
    *,
    best: str | None,
    axes: Sequence[str],
    require: Sequence[str],
    progress: Progress,
) -> tuple[tuple[Combination, ...], Search | None]:
    """Return the combinations that are made in any case, and who searches for more.
    All of them without `trials`, or if they are no more; else a sampler chooses, `random` by default.

    Raises RecipeError as the matrix does, UsageError for a sampler that is not known or a metric
    that is not measured, and what `_search` does.
    """
    how = sampler or ("grid" if trials is None else "random")
    if how not in SAMPLERS:
        raise UsageError(f"'{how}' is no sampler", where="sweep", remedy=f"Take one of {', '.join(SAMPLERS)}")
    if trials is None and how != "grid":
        what = "it makes as many combinations as --trials says, and that says nothing"
        raise UsageError(what, where=f"--sampler {how}", remedy="Add --trials 40")
    if trials is not None and matrix.has_more_than(trials) and how in (TPE, NSGA2):
        search = _search(matrix, how, trials, seed, best, axes, require, progress)
        included = matrix.included(trials)
        made = frozenset(each.content for each in included)
        return included, replace(search, trials=trials - len(included), made=made)
    if trials is None:
        found = matrix.combinations()
    else:
        found = matrix.first(trials) if how == "grid" else matrix.some(trials, seed)
    evals = {repr(entry.value): entry.value for each in found for entry in each.recipe.evals}
    for option, gates in (
        ("--best", [parse_metric(best, "--best")] if best else []),
        ("--axis", [parse_metric(text, "--axis") for text in axes]),
        ("--require", [parse_requirement(text) for text in require]),
    ):
        for gate in gates:
            _check(gate, [*evals.values()], option)
    return found, None


def _search(
    matrix: Matrix,
    sampler: str,
    trials: int,
    seed: int,
    best: str | None,
    axes: Sequence[str],
    require: Sequence[str],
    progress: Progress,
) -> Search:
    """Return a search for what is `best`, or for the front along `axes`.

    Raises UsageError for a metric that is not measured or that a search cannot learn from,
    MissingPackageError without Optuna.
    """
    where = f"--sampler {sampler}"
    option, named = ("--best", [best] if best else []) if sampler == TPE else ("--axis", [*dict.fromkeys(axes)])
    if sampler == TPE and not named:
        raise UsageError("it searches for one metric, and none is named", where=where, remedy="Add --best perplexity")
    if sampler == NSGA2 and len(named) < 2:
        what = f"it searches along two metrics or more, and {len(named) or 'none'} is named"
        raise UsageError(what, where=where, remedy="Add --axis perplexity --axis size_bytes")
    recipe = matrix.covering()[0].recipe
    objectives = tuple(_objective(text, recipe, option) for text in named)
    limits = []
    for gate in map(parse_requirement, require):
        if _is_measured(gate, recipe, "--require"):
            limits.append(gate)
        else:
            progress.say(f"--require {gate.key}: a timing, by which is chosen at the end and not searched")
    _study(sampler, seed, len(objectives))
    return Search(matrix, sampler, trials, seed, objectives, tuple(limits))


def _study(sampler: str, seed: int, objectives: int) -> Any:
    """Return an empty study in memory; raises MissingPackageError without Optuna."""
    with needing("optuna", f"--sampler {sampler}", "optkit[sweep]"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers = optuna.samplers
    chosen = (
        samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
        if sampler == TPE
        else samplers.NSGAIISampler(seed=seed, population_size=POPULATION)
    )
    return optuna.create_study(sampler=chosen, directions=["minimize"] * objectives)


def _check(gate: Gate, evals: Sequence[Eval], option: str) -> None:
    """Raise UsageError if none of the evals measures what is named."""
    try:
        check_named(gate, evals)
    except ValueError as error:
        raise UsageError(str(error), where=option) from error


def _is_measured(gate: Gate, recipe: Recipe, option: str) -> bool:
    """Say whether a metric is measured with each artifact, and not timed at the end.
    Raises UsageError if it is not measured at all.
    """
    _check(gate, [entry.value for entry in recipe.evals], option)
    return bool(_rows(gate, [entry.value for entry in recipe.untimed().evals]))


def _objective(text: str, recipe: Recipe, option: str) -> Gate:
    """Return the row that a text names."""
    gate = parse_metric(text, option)
    evals = [entry.value for entry in recipe.untimed().evals]
    if not _is_measured(gate, recipe, option):
        others = list(dict.fromkeys(next(iter(each.metrics)) for each in evals if each.metrics))
        why = "A sweep takes its timings last, when nothing else runs, so that no search can learn from them"
        remedy = f"Name what is measured with each artifact: {', '.join(others)}" if others else "Add an eval"
        raise UsageError(f"'{text}' is a timing", where=option, why=why, remedy=remedy)
    rows = _rows(gate, evals)
    if len(rows) > 1 and gate.labels not in rows:
        there = ", ".join(metric_key(gate.name, row) for row in rows)
        raise UsageError(f"'{text}' has {len(rows)} rows", where=option, remedy=f"Name one of them: {there}")
    return gate


def _rows(gate: Gate, evals: Sequence[Eval]) -> list[dict[str, int | str]]:
    return [
        row
        for each in evals
        if gate.name in each.metrics
        for row in each.rows_of(gate.name)
        if gate.labels.items() <= row.items()
    ]


def _named(scorecard: Scorecard, gate: Gate) -> float | None:
    """Return the value of the row that a gate names, the smaller the better; None without one."""
    rows = [row.metric for row in scorecard.rows if gate.matches(row.metric) and not row.metric.failure]
    exact = [each for each in rows if each.labels == gate.labels]
    found = next(iter(exact or rows), None)
    return None if found is None else -found.value if found.higher_is_better else found.value
