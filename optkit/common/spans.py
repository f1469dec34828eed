"""Spans of OpenTelemetry: one for a run, one for each of its steps and evals.

They are sent by OTLP over HTTP to where OTEL_EXPORTER_OTLP_ENDPOINT says. Without that variable, or
`OTEL_TRACES_EXPORTER=otlp`, nothing is imported and nothing is sent.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

from optkit.progress import Progress

TIMEOUT_S = 2.0
"""How long an endpoint may take if OTEL_EXPORTER_OTLP_TIMEOUT does not say it."""
Fact: TypeAlias = str | float | int | bool
_tracer: ContextVar[Any] = ContextVar("tracer", default=None)


@contextmanager
def tracing(progress: Progress) -> Iterator[None]:
    """Send the spans of this block if the environment says where to; what fails is a warning."""
    if _tracer.get() is not None or not _is_wanted():
        yield
        return
    try:
        from opentelemetry import context
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        exporter = UntilItFails(_exporter())
    except ImportError:
        progress.warn("spans are not sent: opentelemetry is not installed. Install optkit[otel], or unset OTEL_*")
        yield
        return
    service = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "optkit")}
    provider = TracerProvider(resource=Resource.create(service), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))  # type: ignore[arg-type]
    carried = TraceContextTextMapPropagator().extract({"traceparent": os.environ.get("TRACEPARENT", "")})
    with ExitStack() as ending, _quiet():
        ending.callback(_tracer.reset, _tracer.set(provider.get_tracer("optkit")))
        ending.callback(context.detach, context.attach(carried))
        try:
            yield
        finally:
            provider.shutdown()
            if exporter.failed:
                progress.warn("spans were not sent: nothing that takes them answers at OTEL_EXPORTER_OTLP_ENDPOINT")


@contextmanager
def span(name: str, **facts: Fact) -> Iterator[Callable[..., None]]:
    """Give a function that adds facts to the span of this block, which has those given here.
    An error ends the span with its message.
    """
    if (tracer := _tracer.get()) is None:
        yield lambda **_: None
        return
    with tracer.start_as_current_span(name, attributes=_named(facts)) as found:
        yield lambda **more: found.set_attributes(_named(more))


def mark(name: str, **facts: Fact) -> None:
    """Leave a span of what took no time now."""
    with span(name, **facts):
        pass


@dataclass
class UntilItFails:
    """An exporter that is not asked again once it failed: a dead endpoint costs one timeout."""

    to: Any
    failed: bool = False

    def export(self, spans: Sequence[Any]) -> Any:
        """Send spans."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        result = SpanExportResult.FAILURE if self.failed else self.to.export(spans)
        self.failed = result is not SpanExportResult.SUCCESS
        return result

    def shutdown(self) -> None:
        """End it."""
        self.to.shutdown()


def _is_wanted() -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if exporters := os.environ.get("OTEL_TRACES_EXPORTER"):
        return "otlp" in exporters.split(",")
    return any(map(os.environ.get, ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")))


def _exporter() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    told = any(map(os.environ.get, ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")))
    return OTLPSpanExporter(timeout=None if told else TIMEOUT_S)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep each try of a failing export out of the log."""
    logger = logging.getLogger("opentelemetry")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _named(facts: dict[str, Fact]) -> dict[str, Fact]:
    return {f"optkit.{name}": value for name, value in facts.items()}
