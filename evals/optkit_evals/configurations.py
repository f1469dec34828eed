"""Measure one configuration after another.
One that does not fit into memory fails in every row that the others have.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from optkit.common.out_of_resources import is_out_of_memory
from optkit.errors import ResourceError
from optkit.measure import EvalContext, Metric, Opened
from optkit.model.memory import return_freed_memory


class Configuration(Protocol):
    """What is measured: it says itself in words."""

    @property
    def labels(self) -> dict[str, int | str]:
        """What tells its rows from others."""


C = TypeVar("C", bound=Configuration)


def measure_each(
    configurations: Sequence[C],
    measure: Callable[[C], list[Metric]],
    session: Opened,
    context: EvalContext,
    where: str,
    remedy: str,
) -> list[Metric]:
    """Return the rows of all configurations. Raises ResourceError if memory runs out in each of
    them, and what `measure` raises.
    """
    found: list[Metric] = []
    failures: dict[C, ResourceError] = {}
    for configuration in configurations:
        try:
            found += measure(configuration)
        except (ResourceError, RuntimeError, MemoryError) as error:
            if not (isinstance(error, ResourceError) or is_out_of_memory(error)):
                raise
            what = f"memory ran out on {session.device}"
            failures[configuration] = ResourceError(what, where=f"{where} at {configuration}", remedy=remedy)
        if configuration in failures:  # behind the handler, which would keep alive what the error's frames hold
            context.warn(str(failures[configuration]))
            gc.collect()
            return_freed_memory(session.device)
    if len(failures) == len(configurations):
        raise failures[configurations[0]]
    rows = {metric.name: metric for metric in found}
    return found + [
        row.model_copy(update={"labels": each.labels, "value": 0.0, "samples": (), "failure": failure.what})
        for each, failure in failures.items()
        for row in rows.values()
    ]
