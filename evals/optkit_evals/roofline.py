"""How near a model comes to the limit of its device.
Beside what throughput measures stands what bandwidth and arithmetic would allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from optkit.measure import EvalContext, Metric, Session
from optkit.model.checkpoint import Checkpoint
from optkit.reports.roofline import Device, Limit, measured_device, rates_text, roof_generation, session_limits, work_of
from optkit.scorecard.numbers import format_value
from optkit_evals.repeats import Cell
from optkit_evals.throughput import Throughput

LIMITS = {
    "prefill_limit_tokens_per_s": "tokens/s",
    "prefill_of_limit": "fraction",
    "prefill_mfu": "fraction",
    "prefill_matrix_mfu": "fraction",
    "decode_limit_tokens_per_s": "tokens/s",
    "decode_of_limit": "fraction",
    "decode_bandwidth_used": "fraction",
    "decode_mfu": "fraction",
}
"""Metric -> unit."""
FORMULAS = (
    "limit: tokens / max(bytes of weights and KV cache / bandwidth, sum over dtypes of operations / rate), "
    "one token of each sequence for"
    " each forward pass, the bandwidth and the rates those of this very device, measured; of_limit: "
    "measured / limit; mfu: operations of"
    " matrices and causal attention / seconds / rate, matrix_mfu: those of matrices alone; bandwidth_used: "
    "bytes of a step / seconds / bandwidth"
)


class Roofline(Throughput):
    """All that throughput measures, prefill and decode beside their limits on this device.
    It gives the share of bandwidth, and the model FLOPs utilization (MFU).

    The device is measured once and kept. List this eval or `throughput`, not both: their rows have
    the same names.
    """

    kind: ClassVar[str] = "roofline"
    example: ClassVar[str] = "- roofline: {batch_sizes: [1, 8], prompts: [512]}"
    version: ClassVar[int] = 200 + Throughput.version
    reads_weights: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, str]] = {**Throughput.metrics, **LIMITS}

    def circumstances(self, device: str) -> dict[str, Any]:
        """Return those of `throughput`, and which measurement of the device the shares are of."""
        return {**super().circumstances(device), "roof": roof_generation(device)}

    def run(self, session: Session, context: EvalContext) -> list[Metric]:
        """Measure.
        Raises what `throughput` raises, and SourceError if the work of the model cannot be counted.
        """
        device, roof = measured_device(session.device, progress=context.progress)
        work = work_of(Checkpoint(session.directory).shape)
        if roof.unsteady and context.turn.index == 0:
            context.warn(
                f"roofline: {device.name} was not quiet when it was measured ({roof.unsteady}): optkit "
                "roofline MODEL --remeasure"
            )
        context.notes.extend([f"roofline: {_roof_text(device)}", *(f"roofline: {note}" for note in work.notes)])
        found = super().run(session, context)
        for cell in self.cells():
            rows = {metric.name: metric for metric in found if metric.labels == cell.labels}
            middle = cell.prompt + cell.new_tokens // 2
            prefill, decode = session_limits(session, work, device, cell.batch, cell.prompt, middle)
            context.notes.append(_side_note(cell, prefill, decode))
            for row in _rows(rows, prefill, decode):
                protocol = f"{FORMULAS}: {_roof_text(device)}; {row.protocol}"
                found.append(row.model_copy(update={"protocol": protocol}))
        return found


def _rows(rows: dict[str, Metric], prefill: Limit, decode: Limit) -> Iterator[Metric]:
    """Yield what stands beside the numbers of one configuration."""
    prompts, steps = rows["prefill_tokens_per_s"], rows["decode_tokens_per_s"]
    matrix_s = prefill.compute_s * prefill.matrix_flops / (prefill.matrix_flops + prefill.attention_flops)
    yield _limit("prefill_limit_tokens_per_s", prompts, prefill)
    yield _share("prefill_of_limit", prompts, prefill, prefill.seconds)
    yield _share("prefill_mfu", prompts, prefill, prefill.compute_s)
    yield _share("prefill_matrix_mfu", prompts, prefill, matrix_s)
    yield _limit("decode_limit_tokens_per_s", steps, decode)
    yield _share("decode_of_limit", steps, decode, decode.seconds)
    yield _share("decode_bandwidth_used", steps, decode, decode.memory_s)
    yield _share("decode_mfu", steps, decode, decode.compute_s)


def _limit(name: str, measured: Metric, limit: Limit) -> Metric:
    """Return a limit, which has no error.
    Its ratio to the baseline's is what the change could gain at most.
    """
    return _row(name, measured, limit.tokens_per_s, ()).model_copy(update={"pairing": "exact", "failure": ""})


def _share(name: str, measured: Metric, limit: Limit, least_s: float) -> Metric:
    """Return the share of a measured time that was needed at least, with its samples."""
    value, *samples = (rate * least_s / limit.tokens for rate in (measured.value, *measured.samples))
    return _row(name, measured, value, samples)


def _row(name: str, measured: Metric, value: float, samples: Sequence[float]) -> Metric:
    update = {"name": name, "value": value, "unit": LIMITS[name], "samples": tuple(samples)}
    return measured.model_copy(update={**update, "higher_is_better": True})


def _roof_text(device: Device) -> str:
    return (
        f"{device.name} moves {format_value(device.bandwidth, 'bytes/s')}; {rates_text(device.rates)} ({device.source})"
    )


def _side_note(cell: Cell, prefill: Limit, decode: Limit) -> str:
    moved = decode.cache_bytes + decode.weight_bytes
    return (
        f"roofline, {cell}, {cell.new_tokens} new tokens: prefill is bound by {prefill.bound_by}, "
        f"decode by {decode.bound_by}"
        f" ({format_value(moved, 'bytes')} a step, {decode.cache_bytes / moved:.0%} of them KV cache)"
    )
