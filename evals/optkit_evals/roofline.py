"""How near a model comes to the limit of its device: what throughput measures, and beside it what bandwidth and arithmetic would allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from optkit.measure import EvalContext, Metric, Session
from optkit.model.checkpoint import Checkpoint
from optkit.roofline import Device, Limit, measured_device, session_limits, work_of
from optkit_evals.throughput import Cell, Throughput

LIMITS = {
    "prefill_limit_tokens_per_s": ("tokens/s", "the least time is max(bytes / bandwidth, operations / rate)"),
    "prefill_of_limit": ("fraction", "measured over that limit"),
    "prefill_mfu": ("fraction", "operations of matrices and causal attention / seconds / rate"),
    "prefill_matrix_mfu": ("fraction", "operations of matrices alone / seconds / rate"),
    "decode_limit_tokens_per_s": ("tokens/s", "the least time of a step is max(bytes / bandwidth, operations / rate)"),
    "decode_of_limit": ("fraction", "measured over that limit"),
    "decode_bandwidth_used": ("fraction", "bytes of weights and KV cache that a step must read / seconds / bandwidth"),
    "decode_mfu": ("fraction", "operations of matrices and attention / seconds / rate"),
}
"""Metric -> unit, formula."""


class Roofline(Throughput):
    """All that throughput measures, and each number of prefill and decode beside its limit on this device: share of bandwidth, MFU.

    The device is measured once and kept. List this eval or `throughput`, not both: their rows have the same names.
    """

    version: ClassVar[int] = 100 + Throughput.version
    reads_weights: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = (*Throughput.metrics, *LIMITS)

    def run(self, session: Session, context: EvalContext) -> list[Metric]:
        """Measure; raises what `throughput` raises, and SourceError where the work of the model cannot be counted."""
        device, roof = measured_device(session.device, progress=context.progress)
        work = work_of(Checkpoint(session.directory).shape)
        for name, spread in roof.unsteady.items():
            context.warn(
                f"roofline: {name} of {device.name} spread by {spread:.0%} when it was measured: optkit roofline MODEL --remeasure"
            )
        context.notes.extend([_roof_note(device), *(f"roofline: {note}" for note in work.notes)])
        found = super().run(session, context)
        for cell in self.cells():
            rows = {metric.name: metric for metric in found if metric.labels == cell.labels}
            prefill, decode = session_limits(session, work, device, cell.batch, cell.prompt, cell.prompt + cell.new_tokens // 2)
            context.notes.append(_side_note(cell, prefill, decode))
            found += _rows(cell, rows, prefill, decode)
        return found


def _rows(cell: Cell, rows: dict[str, Metric], prefill: Limit, decode: Limit) -> Iterator[Metric]:
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
    """Return a limit, which has no error; its ratio to the baseline's is what the change could gain at most."""
    return _row(name, measured, limit.tokens_per_s, ()).model_copy(update={"interval": None, "pairing": "exact", "failure": ""})


def _share(name: str, measured: Metric, limit: Limit, least_s: float) -> Metric:
    """Return the share of a measured time that was needed at least, with the samples and the interval of what was measured."""
    return _row(name, measured, measured.value * least_s / limit.tokens, [rate * least_s / limit.tokens for rate in measured.samples])


def _row(name: str, measured: Metric, value: float, samples: Sequence[float]) -> Metric:
    unit, formula = LIMITS[name]
    scale = value / measured.value if measured.value else 0.0
    interval = (measured.interval[0] * scale, measured.interval[1] * scale) if measured.interval else None
    protocol = f"{measured.protocol}; {name}: {formula}"
    update = {"name": name, "value": value, "unit": unit, "interval": interval, "protocol": protocol, "samples": tuple(samples)}
    return measured.model_copy(update={**update, "higher_is_better": True})


def _roof_note(device: Device) -> str:
    rates = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in device.rates.items())
    return f"roofline: {device.name} moves {device.bandwidth / 1e9:,.4g} GB/s; TFLOP/s: {rates} ({device.source})"


def _side_note(cell: Cell, prefill: Limit, decode: Limit) -> str:
    share = decode.cache_bytes / (decode.cache_bytes + decode.weight_bytes)
    return (
        f"roofline, {cell}, {cell.new_tokens} new tokens: prefill is bound by {prefill.bound_by}, decode by {decode.bound_by}"
        f" ({(decode.weight_bytes + decode.cache_bytes) / 1e9:,.4g} GB a step, {share:.0%} of them KV cache)"
    )
