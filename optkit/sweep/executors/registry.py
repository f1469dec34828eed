"""The executors that `optkit sweep` can use.
They are a dict of strings, so that listing imports nothing.

A plug-in package adds its own with an entry point of the group `optkit.executors`.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from optkit.common.plug_ins import with_plug_ins
from optkit.errors import UsageError, did_you_mean
from optkit.sweep.executors.base import Executor

EXECUTORS = {
    "local": "optkit.sweep.executors.local:LocalExecutor",
    "ray": "optkit.sweep.executors.ray:RayExecutor",
    "slurm": "optkit.sweep.executors.slurm:SlurmExecutor",
}
"""Name -> `module:class` of an `optkit.sweep.executors.base.Executor`."""


def executor_of(name: str, **settings: object) -> Executor:
    """Return the executor of a name.
    Raises UsageError for a name or a setting that is not known, and what the executor raises.
    """
    known = with_plug_ins("executor", EXECUTORS)
    if name not in known:
        raise UsageError(f"there is no executor '{name}'.{did_you_mean(name, known)}", where="--executor")
    found: Any = resolve_name(known[name].target)
    given = {setting: value for setting, value in settings.items() if value}
    for setting in given:
        if setting not in found.settings:
            what, remedy = f"the executor {name} does not take it", "Leave it out, or name another executor"
            raise UsageError(what, where=f"--{setting}", remedy=remedy)
    made: Executor = found(**given)
    return made
