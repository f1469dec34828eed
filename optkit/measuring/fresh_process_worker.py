"""A turn in the process that `parent` starts: open one model, measure it, return the results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from optkit.common.frozen import restored
from optkit.measure import EvalContext
from optkit.measuring.fresh_process import answers
from optkit.processes.child_program import Parent
from optkit.progress import Progress
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
    context = EvalContext(
        seed=order["seed"],
        progress=progress,
        data=None if order["data"] is None else Path(order["data"]),
        calibrated_on=tuple(order["calibrated_on"]),
    )
    try:
        found = answers(session, [*map(restored, order["evals"])], context, order["device"], order["turn"])
    finally:
        session.close()
    return [each.to_json() for each in found]
