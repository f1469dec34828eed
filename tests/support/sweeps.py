"""What tests of sweeps share: a small matrix, and an executor that makes artifacts in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from optkit import pipeline
from optkit.errors import OptkitError
from optkit.measure import EvalContext, Metric
from optkit.progress import Progress
from optkit.recipe.recipe import load_recipe
from optkit.sweep.executors.base import Executor, Order, Outcome, reason_of
from optkit.sweep.executors.local import LocalExecutor
from tests.support.quick_evals import THROUGHPUT
from tests.support.waiting import wait_until

STAGES: list[Any] = ["bf16", "rtn"]
MATRIX: dict[str, Any] = {"stages.1.rtn.bits": [4, 8], "stages.1.rtn.group_size": [16, 32]}
NAMES = ["bits4-group_size16", "bits4-group_size32", "bits8-group_size16", "bits8-group_size32"]
TIMED = {"throughput": {**THROUGHPUT["throughput"], "processes": 2}}


def recipe(model: Path, text: Path, timed: bool = False, **changed: Any) -> dict[str, Any]:
    """Return a recipe of four combinations that share a stage."""
    perplexity = {"perplexity": {"dataset": str(text), "window": 32, "windows": 4}}
    evals = ["footprint", perplexity, *([TIMED] if timed else [])]
    return {"name": "s", "model": str(model), "stages": STAGES, "evals": evals, "matrix": MATRIX, **changed}


def quick_throughput(self: object, session: object, context: EvalContext) -> list[Metric]:
    """Stand in for `Throughput.run`: a number for each turn."""
    speed = 100.0 + context.turn.index
    said = {"unit": "tokens/s", "higher_is_better": True, "protocol": "p", "pairing": "paired_turns"}
    return [Metric.model_validate({"name": "decode_tokens_per_s", "value": speed, "samples": (speed,), **said})]


class Here(LocalExecutor):
    """Makes artifacts in this process; `before` sees each order first and may raise."""

    def __init__(self, before: Callable[[Order], None] = lambda order: None) -> None:
        self.before = before
        self.made: list[str] = []
        self.limits: list[float | None] = []

    def run(self, order: Order, progress: Progress, timeout_s: float | None) -> Outcome:
        self.limits.append(timeout_s)
        try:
            self.before(order)
            scorecard = pipeline.run(
                load_recipe(order.recipe.resolved()),
                out=order.out,
                device=order.device,
                store=order.store,
                data=order.data,
                timings=False,
                progress=progress,
            )
        except OptkitError as error:
            return Outcome(None, reason_of(error), 1.0)
        self.made.append(order.name)
        return Outcome(str(scorecard.verdict), "", 1.0)


def order_of(home: Path, model: Path, name: str, text: Path) -> Order:
    """Return a recipe of one stage and one eval, to be made below a directory."""
    perplexity = {"perplexity": {"dataset": str(text), "window": 32, "windows": 2}}
    asked = {"model": str(model), "stages": ["rtn"], "evals": [perplexity]}
    return Order(name, load_recipe(asked).pinned(None), home / "s" / name, "cpu", home / "store", None)


def made(executor: Executor, order: Order, lines: Progress) -> Outcome:
    """Wait until an executor is done with its only order."""
    outcomes: dict[str, Outcome] = {}
    assert wait_until(lambda: bool(outcomes.update(executor.ended(lines, 0.5)) or outcomes))
    return outcomes[order.name]
