"""One recipe of a sweep in the process that an executor starts: make it, measure it, say its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optkit.processes.child_program import Parent


def work(parent: Parent) -> dict[str, Any]:
    """Do what the order asks for."""
    from optkit import pipeline
    from optkit.recipe.recipe import load_recipe

    order = parent.order()
    scorecard = pipeline.run(
        load_recipe(order["recipe"]),
        out=Path(order["out"]),
        device=order["device"],
        store=Path(order["store"]),
        data=None if order["data"] is None else Path(order["data"]),
        against=order["against"],
        timings=False,
        since=order["since"],
        progress=parent,
    )
    return {"verdict": str(scorecard.verdict)}
