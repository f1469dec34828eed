"""Trace prefill and decode of an ONNX session with ONNX Runtime's own profiler.
See https://onnxruntime.ai/docs/performance/tune-performance.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from optkit.common.grouping import by_key
from optkit.errors import EvalError
from optkit.reports.profiling.torch_trace import Traced, longest_first, time_phases
from optkit.session.onnx_session import OnnxSession

RUN, NODE = "model_run", "_kernel_time"
"""How ONNX Runtime names a call of the graph, and what the names of its nodes' times end in."""


def trace_onnx_phases(session: OnnxSession, tokens: Tensor, new_tokens: int, directory: Path) -> dict[str, Traced]:
    """Return prefill and decode as ONNX Runtime saw them; writes PHASE.trace.json for each.

    Raises EvalError on a GPU, whose kernels are not in that profile, and if ONNX Runtime GenAI
    generates.
    """
    where = str(session.directory)
    if session.device != "cpu":
        why = "ONNX Runtime's profile holds the launches of kernels there, not the kernels"
        remedy = "Use --device cpu, or Nsight: nsys profile optkit eval ..."
        raise EvalError("an ONNX model cannot be profiled on a GPU", where=where, why=why, remedy=remedy)
    if session.generates_elsewhere:
        remedy = "Take `engine` out of onnx_provider, or open the directory in another artifact without it"
        raise EvalError("ONNX Runtime GenAI does not say where its time goes", where=where, remedy=remedy)
    with tempfile.TemporaryDirectory() as place:
        with _profiled(session, Path(place)) as profile:
            for _ in range(2):  # the first warms the new session up
                time_phases(session, tokens, new_tokens)
        events: list[dict[str, Any]] = json.loads(profile[0].read_text(encoding="utf-8"))
    runs = sorted((event for event in events if event["name"] == RUN), key=lambda event: event["ts"])
    runs = runs[len(runs) // 2 :]
    phases = {"prefill": runs[: 1 - new_tokens], "decode": runs[1 - new_tokens :]}
    return {name: _read(events, of, directory / f"{name}.trace.json") for name, of in phases.items()}


@contextmanager
def _profiled(session: OnnxSession, place: Path) -> Iterator[list[Path]]:
    """Let a session that keeps a profile compute meanwhile; the list gets the file that it wrote."""
    import onnxruntime

    opened = session.runner.opened
    options = opened.session.get_session_options()
    options.enable_profiling = True
    options.profile_file_prefix = str(place / "onnxruntime")
    providers = list(opened.session.get_provider_options().items())
    traced = onnxruntime.InferenceSession(str(session.runner.directory.graph.path), options, providers=providers)
    session.runner.compute_with(traced)
    found: list[Path] = []
    try:
        yield found
    finally:
        session.runner.compute_with(opened.session)
        found.append(Path(traced.end_profiling()))


def _read(events: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]], trace: Path) -> Traced:
    """Return what happened in some calls of the graph by operation; write the events to `trace`."""
    start, end = runs[0]["ts"], runs[-1]["ts"] + runs[-1]["dur"]
    inside = [event for event in events if start <= event["ts"] <= end]
    trace.write_text(json.dumps({"traceEvents": inside}), encoding="utf-8")
    nodes = (event for event in inside if event["name"].endswith(NODE))
    ordered = longest_first(by_key((event["args"]["op_name"], event["dur"] / 1e6) for event in nodes))
    return Traced(sum(run["dur"] for run in runs) / 1e6, sum(line.seconds for line in ordered), ordered)
