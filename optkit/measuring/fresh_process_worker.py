"""A turn in the process that `parent` starts: open one model, measure it, return the results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from optkit.common.frozen import restored
from optkit.environment import describe_environment
from optkit.measure import EvalContext, Found, Turn
from optkit.measuring.fresh_process import Answer
from optkit.processes.child_program import Parent
from optkit.progress import Progress, asking
from optkit.session import open_session


def work(parent: Parent) -> list[dict[str, Any]]:
    """Measure what the order asks for."""
    return run(parent.order(), parent)


def run(order: Mapping[str, Any], progress: Progress) -> list[dict[str, Any]]:
    """Open the model of an order, run its evals one after another, and return JSON values.
    They are what each eval measured.
    """
    if order["threads"] is not None:
        torch.set_num_threads(order["threads"])
    settings = [restored(each) for each in order["settings"]]
    trusted = order["trust_remote_code"]
    session = open_session(
        Path(order["directory"]), settings, device=order["device"], progress=progress, trust_remote_code=trusted
    )
    found = []
    try:
        for each in map(restored, order["evals"]):
            context = EvalContext(
                seed=order["seed"],
                progress=progress,
                data=None if order["data"] is None else Path(order["data"]),
                calibrated_on=tuple(order["calibrated_on"]),
                turn=Turn(order["turn"], each.turns()),
            )
            results = Found.of(each, session, context)
            environment = describe_environment(order["device"])
            warnings = (*asking(session.notes), *context.warnings)
            said = tuple(context.notes), session.notes, environment, warnings
            found.append(Answer(results, *said).to_json())
    finally:
        session.close()
    return found
