"""What a node of a cluster does for a sweep: it makes and measures one recipe, into its store."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from optkit import __version__
from optkit.common.frozen import digest
from optkit.errors import StoreError
from optkit.processes.child_program import Lines, Parent, described
from optkit.sweep.executors.local import make_in_child


def make_on_node(order: Mapping[str, Any], lines: Lines) -> dict[str, Any]:
    """Return the outcome of an order that was made here, and the log of it.
    The artifact itself is left to the driver: all that it needs lies in the store.

    What is said meanwhile goes to `lines` as `processes.child` understands it.
    """
    if said := refusal(order):
        return {"refused": said}
    parent = Parent(lines)
    parent.tell("begin")
    parent.say(f"begins on {socket.gethostname()}")
    store, cwd = Path(order["store"]), Path(order["cwd"])
    store.mkdir(parents=True, exist_ok=True)
    # Beside the store an artifact is links. The name stays: a later run clears up what a kill left.
    home = store.parent if os.access(store.parent, os.W_OK) else Path(tempfile.gettempdir())
    place = home / f".{store.name}-{digest(order['out'])[:16]}"
    try:
        place.mkdir(exist_ok=True)
        given = {**order, "out": str(place / "artifact")}
        outcome = make_in_child(given, place / "log", parent, None, cwd if cwd.is_dir() else None)
        return {**asdict(outcome), "log": (place / "log").read_text(encoding="utf-8", errors="replace")}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def refusal(order: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the error of a node that cannot work for the driver, as `processes.described` has it; None
    if it can.
    """
    node, error = f"node {socket.gethostname()}", None
    if order["optkit"] != __version__:
        what = f"it has optkit {__version__}, and the sweep {order['optkit']}"
        error = StoreError(what, where=node, remedy="Install the same everywhere")
    elif order["seen"] and not Path(order["seen"]).exists():
        what = f"it does not see the store {order['store']} of the sweep"
        why = "The steps that it makes would stay there"
        remedy = "Name a store on a disk that all nodes share with --store, or a remote one with --remote"
        error = StoreError(what, where=node, why=why, remedy=remedy)
    return described(error) if error else None
