"""Where models are opened, measured and closed again; every number is kept in the store."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from optkit.common.spans import span
from optkit.devices.cpu_watch import make_room
from optkit.devices.memory_watch import OPEN, MemoryTrace, MemoryWatch
from optkit.environment import describe_environment
from optkit.measure import EvalContext, Found, Opened
from optkit.model.config_file import read_config
from optkit.model.task import Task, task_of
from optkit.plan import PlannedEval
from optkit.processes import signals
from optkit.progress import Named, asking
from optkit.stage import Setting
from optkit.store.durations import Durations
from optkit.store.store import Store


@dataclass
class UnopenedModel:
    """A directory of weights whose code transformers does not have."""

    directory: Path
    device: str
    vocabulary: int = 0
    positions: int = 0
    trust_remote_code: bool = False
    hidden_memory: str = ""
    notes: tuple[str, ...] = ("transformers does not have the model's code: its files alone were measured",)

    def close(self) -> None:
        """Do nothing: nothing was opened."""


Wanted = Sequence[tuple[str, PlannedEval]]
"""Evals to run on one model, each with the key of its numbers."""


@dataclass(frozen=True)
class Subject:
    """A model to be measured: how to find its weights (made only when needed) and how to open them."""

    weights: Callable[[], Path]
    settings: Sequence[Setting]
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Bench:
    """Where models are opened, measured and closed again; every number is kept in the store."""

    store: Store
    device: str
    context: EvalContext
    size_bytes: int
    """Bytes of the unmodified model's weights."""
    openings: dict[int, tuple[MemoryTrace, ...]] = field(default_factory=dict)
    """What opening a session needed, by its `id`, until an eval is kept that measured it."""

    def measure(self, session: Opened, wanted: Wanted, beside: Opened | None = None, of: str = "") -> None:
        """Run evals on one opened model, and keep each under its key.
        Those that compare have the baseline `beside` it. Progress says whose evals they are, if `of` does.
        """
        progress = Named(self.context.progress, of)
        for key, each in wanted:
            signals.check()
            compared = beside if each.eval.compares else None
            context = replace(self.context, baseline=compared, progress=progress, notes=[], warnings=[])
            start = time.perf_counter()
            with (
                span(f"eval {each.kind}", kind=each.kind, key=key, status="measured") as told,
                MemoryWatch(each.kind, self.device) as memory,
            ):
                found = Found.of(each.eval, session, context)
                told(seconds=(seconds := time.perf_counter() - start))
            traces = (*self.openings.pop(id(session), ()), *memory.traces)
            notes, warnings = [*session.notes, *context.notes], [*asking(session.notes), *context.warnings]
            self.keep(key, each, found, notes, seconds, warnings=warnings, memory=traces)

    def keep(
        self,
        key: str,
        planned: PlannedEval,
        found: Found,
        notes: Sequence[str],
        seconds: float,
        environment: Mapping[str, Any] | None = None,
        warnings: Sequence[str] = (),
        memory: Sequence[MemoryTrace] = (),
    ) -> None:
        """Keep what an eval measured, with what the scorecard must say beside it. Those of the notes
        that ask someone to act are `warnings`. `environment` is this process's if it is not given.
        """
        self.store.put_json(
            key,
            {
                **found.to_json(),
                "notes": list(notes),
                "warnings": list(warnings),
                "memory": [trace.model_dump(mode="json") for trace in memory],
                "environment": environment or describe_environment(self.device),
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "seconds": round(seconds, 3),
            },
        )
        Durations(self.store.root, self.device).note(planned.duration_of(key), planned.eval, self.size_bytes, seconds)

    @contextmanager
    def opened(self, subject: Subject) -> Iterator[Opened]:
        """Open a session and give its memory back afterwards.
        Of a model that nobody can open, the files alone are there.
        """
        make_room(self.context.progress)
        from optkit.session import open_session

        weights = subject.weights()
        config = weights / "config.json"
        if config.is_file() and task_of(read_config(config)) is Task.UNKNOWN:
            yield UnopenedModel(weights, self.device)
            return
        with MemoryWatch(OPEN, self.device) as memory:
            session = open_session(
                weights,
                subject.settings,
                device=self.device,
                progress=self.context.progress,
                trust_remote_code=subject.trust_remote_code,
            )
        self.openings[id(session)] = memory.traces
        try:
            yield session
        finally:
            self.openings.pop(id(session), None)
            session.close()
            gc.collect()


def known(store: Store, key: str | None) -> bool:
    """Say whether a metric needs no measuring: it is in the store, or there is none to measure."""
    return key is None or store.get_json(key) is not None
