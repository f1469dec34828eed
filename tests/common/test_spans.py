"""Spans: one for a run, its steps and evals; sent only if asked for, and never at a run's cost."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from optkit import pipeline
from optkit.common import spans
from optkit.errors import StageError
from optkit.stages.cast import Cast
from tests.conftest import Warnings
from tests.support.fresh_python import imported_by
from tests.support.http_server import Quiet, served

RECIPE = "name: tiny\nmodel: {model}\nstages: [bf16]\nevals: [footprint]\n"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER", "TRACEPARENT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the SDK's exporter to memory, in place of the one that sends."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs opentelemetry")
    exporter = memory.InMemorySpanExporter()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:1")
    monkeypatch.setattr(spans, "_exporter", lambda: exporter)
    return exporter


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bytes]]]:
    """Return what a server was sent, which the environment names."""
    received: list[tuple[str, bytes]] = []

    class Receiver(Quiet):
        def do_POST(self) -> None:  # noqa: N802
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    with served(Receiver) as host:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{host}")
        yield received


def test_a_run_and_each_of_its_steps_and_evals(
    kept: Any, tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE.format(model=tiny_model("llama")), encoding="utf-8")

    def spans_of_a_run(**changes: Any) -> list[Any]:
        kept._stopped = False
        kept.clear()
        pipeline.run(recipe, out=tmp_path / "out", store=tmp_path / "store", device="cpu", **changes)
        return list(kept.get_finished_spans())

    step, baseline, measured, run = spans_of_a_run()
    assert [each.name for each in (step, baseline, measured, run)] == [
        "step cast",
        "eval footprint",
        "eval footprint",
        "run tiny",
    ]
    assert {each.parent.span_id for each in (step, measured, baseline)} == {run.context.span_id}
    facts = {name.removeprefix("optkit."): value for name, value in step.attributes.items()}
    assert (facts["kind"], facts["status"]) == ("cast", "made")
    assert len(facts["key"]) == 64
    assert facts["seconds"] >= 0
    assert facts["bytes"] > sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert baseline.attributes["optkit.key"] != measured.attributes["optkit.key"]
    assert run.attributes["optkit.verdict"] == "PASS"

    stored = spans_of_a_run()
    assert [(each.name, each.attributes.get("optkit.status")) for each in stored] == [
        ("step cast", "stored"),
        ("eval footprint", "stored"),
        ("run tiny", None),
    ]

    def fail(*_words: object) -> None:
        raise StageError("it broke")

    monkeypatch.setattr(Cast, "run", fail)
    with pytest.raises(StageError):
        spans_of_a_run(overrides=["seed=1"])
    assert [
        (each.name, each.status.status_code.name, each.status.description) for each in kept.get_finished_spans()
    ] == [("step cast", "ERROR", "StageError: it broke."), ("run tiny", "ERROR", "StageError: it broke.")]


def test_an_endpoint_is_sent_them_below_the_span_that_calls_optkit(
    receiver: list[tuple[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs opentelemetry")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    monkeypatch.setenv("TRACEPARENT", PARENT)
    progress = Warnings()
    with spans.tracing(progress), spans.span("run x", model="m") as told:
        spans.mark("step y")
        told(verdict="PASS")
    ((path, body),) = receiver
    assert path == "/v1/traces"
    (sent,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert [each.value.string_value for each in sent.resource.attributes if each.key == "service.name"] == ["optkit"]
    step, run = sent.scope_spans[0].spans
    assert (step.name, run.name, step.parent_span_id) == ("step y", "run x", run.span_id)
    assert f"00-{run.trace_id.hex()}-{run.parent_span_id.hex()}-01" == PARENT
    assert {each.key: each.value.string_value for each in run.attributes} == {
        "optkit.model": "m",
        "optkit.verdict": "PASS",
    }
    assert progress.lines == []


def test_a_dead_endpoint_is_said_once_and_asked_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs opentelemetry")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    progress = Warnings()
    with spans.tracing(progress):
        spans.mark("run")
    assert progress.lines == ["spans were not sent: nothing that takes them answers at OTEL_EXPORTER_OTLP_ENDPOINT"]
    assert (capsys.readouterr().err, caplog.messages) == ("", [])


def test_after_a_failure_nothing_more_is_sent() -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export", reason="needs opentelemetry")
    asked: list[Any] = []

    class Failing:
        def export(self, batch: Any) -> Any:
            asked.append(batch)
            return export.SpanExportResult.FAILURE

    exporter = spans.UntilItFails(Failing())
    assert [exporter.export([number]).name for number in range(3)] == ["FAILURE"] * 3
    assert (asked, exporter.failed) == ([[0]], True)


def test_a_missing_package_is_said_and_the_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    progress, done = Warnings(), []
    with spans.tracing(progress), spans.tracing(progress), spans.span("run") as told:
        told(verdict="PASS")
        done.append(1)
    assert done == [1]
    assert progress.lines[0] == (
        "spans are not sent: opentelemetry is not installed. Install optkit[otel], or unset OTEL_*"
    )


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_nothing_is_imported_unless_it_is_asked_for(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code = "from optkit.common.spans import *; from optkit.progress import SilentProgress\n"
    code += "with tracing(SilentProgress()): mark('x')"
    assert not {name for name in imported_by(code) if name.startswith("opentelemetry")}
