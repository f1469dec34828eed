"""A plan counts the further models that tell where damage and speed come from."""

import json
from pathlib import Path
from typing import Any

import pytest
from optkit_cli.output import plain_text
from optkit_cli.plan_view import plan_view

from optkit.pipeline import plan
from optkit.plan import Plan
from optkit.recipe.matrix_reading import load_matrix
from optkit.recipe.recipe import load_recipe
from optkit.store.durations import Durations
from optkit.store.store import Store
from optkit.sweep.plan import SweepPlan, plan_sweep
from tests.conftest import TinyModel
from tests.support.quick_evals import THROUGHPUT

PRUNE: dict[str, object] = {"prune": {"sparsity": 0.5, "method": "magnitude"}}
RTN: dict[str, object] = {"rtn": {"bits": 4, "group_size": 16}}


@pytest.fixture
def asked(tiny_model: TinyModel, letters: Path) -> dict[str, Any]:
    """Return a recipe of two stages, with a timing and a measurement of accuracy."""
    evals = [THROUGHPUT, {"perplexity": {"dataset": str(letters), "window": 32, "windows": 2}}]
    return {"name": "s", "model": str(tiny_model("llama")), "stages": [PRUNE, RTN], "evals": evals}


def planned(asked: dict[str, Any], store: Path) -> Plan:
    return plan(load_recipe(asked), device="cpu", store=store)


def remembered(found: Plan, store: Path, keys: set[str]) -> None:
    """Put numbers in the store under these keys."""
    for key in keys:
        Store(store).put_json(key, {"metrics": []})


def test_further_models_are_named_and_need_memory_and_time(asked: dict[str, Any], tmp_path: Path) -> None:
    found = planned(asked, tmp_path)
    assert [each.kind for each in found.further] == [
        "throughput, same engine",
        "throughput, prune",
        "perplexity, after prune",
    ]
    same, pruned, after = found.further
    assert same.cost.ram_bytes == pruned.cost.ram_bytes > found.steps[0].size_bytes
    assert found.ram_bytes >= after.cost.ram_bytes > 0
    assert [each.seconds for each in found.further] == [None] * 3
    shown = plain_text(*plan_view(found))
    assert "2 of 3 steps and 5 of 5 evals to do" in shown
    assert "throughput, same engine" in shown
    assert planned({**asked, "attribution": False}, tmp_path).further == ()


def test_their_time_is_what_such_models_took_here(asked: dict[str, Any], tmp_path: Path) -> None:
    found = planned(asked, tmp_path)
    for what, seconds in (("unmodified model", 3.0), ("artifact", 5.0), ("further model", 7.0)):
        size = found.steps[0].size_bytes
        Durations(tmp_path, "cpu").note(f"throughput of the {what}", found.evals[0].eval, size, seconds)
    again = planned(asked, tmp_path)
    assert again.evals[0].seconds == pytest.approx(8.0)
    assert [each.seconds for each in again.further] == [pytest.approx(7.0), pytest.approx(7.0), None]
    for each in again.evals:
        assert [each.duration_of(key or "") for key in (each.key, each.baseline_key)] == [
            f"{each.kind} of the artifact",
            f"{each.kind} of the unmodified model",
        ]


def test_what_is_missing_is_timed_in_turns_with_both_models_again(asked: dict[str, Any], tmp_path: Path) -> None:
    found = planned(asked, tmp_path)
    keys = {key for each in found.evals for key in (each.key, each.baseline_key) if key}
    remembered(found, tmp_path, keys)
    again = planned(asked, tmp_path)
    assert [each.pending for each in again.evals] == [True, False]
    assert again.evals[0].cost.ram_bytes > 0
    assert [each.pending for each in planned({**asked, "attribution": False}, tmp_path).evals] == [False, False]
    remembered(found, tmp_path, {each.key for each in found.further})
    done = planned(asked, tmp_path)
    assert not any(each.pending for each in (*done.evals, *done.further))


def sweep_plan(asked: dict[str, Any], store: Path, **changed: Any) -> SweepPlan:
    many = load_matrix(json.dumps(asked | changed, indent=1), ["stages.1.rtn.bits=4,8"])
    return plan_sweep("s", many.combinations(), device="cpu", store=store)


def test_the_plan_of_a_sweep_counts_each_once(asked: dict[str, Any], tmp_path: Path) -> None:
    alone, told = (sweep_plan(asked, tmp_path, attribution=attribution) for attribution in (False, True))
    # The unmodified model in the engine and the pruned one, in turns with both artifacts, and what pruning damaged.
    assert told.unknown == alone.unknown + 3
