"""What torch's compiler did while a session was open.
Graphs, seconds, its caches, and the lines at which it broke a graph.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch._dynamo
from torch._dynamo.utils import compilation_time_metrics, counters

from optkit.errors import StageError, first_line

BREAKS = "torch._dynamo.symbolic_convert.__graph_breaks"
"""The log of torch that `TORCH_LOGS=graph_breaks` shows."""
PLACE = re.compile(r"in user code at (?P<file>.+?):(?P<line>\d+)\n(?P<rest>.*)", re.DOTALL)
SHOWN_BREAKS = 5


class _Listener(logging.Handler):
    """Keeps the place and the reason of each graph break."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.breaks: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if found := PLACE.search(record.getMessage()):
            self.breaks[f"{_short(found['file'])}:{found['line']} ({_reason(found['rest'])})"] += 1


class CompileWatch:
    """Listens from its making to `close`."""

    def __init__(self) -> None:
        self._listener = _Listener()
        self._log = logging.getLogger(BREAKS)
        self._before = self._log.level, self._log.propagate
        if not self._log.isEnabledFor(logging.DEBUG):
            self._log.setLevel(logging.DEBUG)
            self._log.propagate = False
        self._log.addHandler(self._listener)
        self._started = _state()

    def notes(self) -> Iterator[str]:
        """Yield what was compiled and in how many seconds, and each place that broke a graph.
        Nothing if nothing was compiled.
        """
        graphs, seconds, hits = (now - before for now, before in zip(_state(), self._started, strict=True))
        if not graphs:
            return
        cached = f", {hits:.0f} of them from the cache of an earlier process" if hits else ""
        yield (
            f"compile: {graphs:.0f} {'graph' if graphs == 1 else 'graphs'} in {seconds:.1f} s, "
            f"outside the timings{cached}"
        )
        breaks = self._listener.breaks
        if breaks:
            shown = [
                f"{place}" + (f" {count} times" if count > 1 else "")
                for place, count in breaks.most_common(SHOWN_BREAKS)
            ]
            more = f", and {len(breaks) - SHOWN_BREAKS} other places" if len(breaks) > SHOWN_BREAKS else ""
            yield (
                f"compile: {breaks.total()} graph breaks, each of which ends a graph and goes back to "
                f"Python: {'; '.join(shown)}{more}"
            )
        else:
            yield "compile: no graph breaks"

    @staticmethod
    @contextmanager
    def errors() -> Iterator[None]:
        """Turn the error of a graph break under `fullgraph` into a StageError with its place."""
        try:
            yield
        except torch._dynamo.exc.Unsupported as error:
            stack = getattr(error, "real_stack", None) or ()
            place = f"{_short(stack[-1].filename)}:{stack[-1].lineno}" if stack else "a place that torch does not name"
            raise StageError(
                f"the decode step is not one graph: it breaks at {place}",
                where="compile",
                why=first_line(error),
                remedy="Set fullgraph: false",
            ) from error

    def close(self) -> None:
        """Stop listening."""
        self._log.removeHandler(self._listener)
        level, self._log.propagate = self._before
        self._log.setLevel(level)


def _state() -> tuple[float, float, float]:
    """Return graphs, seconds of compiling and hits of the cache, of this process so far."""
    inductor = counters["inductor"]
    hits = counters["aot_autograd"]["autograd_cache_hit"] or inductor["fxgraph_cache_hit"]
    return counters["stats"]["unique_graphs"], sum(compilation_time_metrics.get("_compile.compile_inner", ())), hits


def _short(file: str) -> str:
    """Return the path of a file below site-packages, else its name."""
    parts = Path(file).parts
    return str(Path(*parts[parts.index("site-packages") + 1 :])) if "site-packages" in parts else Path(file).name


def _reason(text: str) -> str:
    """Return the sentence that says what torch could not trace."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line.removeprefix("Graph Break Reason:").strip() for line in lines]
    return next((line for line in lines if not line.startswith("Encountered graph break")), "no reason given")
