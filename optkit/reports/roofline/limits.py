"""The limits of a model's work: a phase takes at least its bytes' and its operations' time.

seconds = max(bytes / bandwidth, sum over dtypes of operations / rate)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from optkit.devices.datasheets import Device
from optkit.devices.gpu_watch import devices_of
from optkit.measure import Session
from optkit.reports.roofline.forms import STORED, Form, parse_form
from optkit.reports.roofline.work import Work

Side: TypeAlias = Literal["weights", "KV cache", "compute"]
WORTHWHILE = 1.1
"""A gain below this is none: it is what measurements of speed disagree by."""
MOST_SEQUENCES = 1 << 20
"""Largest batch that is looked at."""
NAMES = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Limit:
    """What one phase needs on one device."""

    batch: int
    """Sequences at once."""
    tokens: int
    """That it computes: those of the prompts, or one for each sequence of the batch."""
    weight_bytes: float
    cache_bytes: float
    memory_s: float
    compute_s: float
    matrix_flops: float
    attention_flops: float

    @property
    def seconds(self) -> float:
        """The least time that it can take."""
        return max(self.memory_s, self.compute_s)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def bound_by(self) -> Side:
        """Which side binds: the arithmetic, or the memory, and of this what is the larger part."""
        if self.compute_s >= self.memory_s:
            return "compute"
        return "weights" if self.weight_bytes >= self.cache_bytes else "KV cache"


def decode_limit(work: Work, form: Form, device: Device, batch: int, context: int) -> Limit:
    """Return the limit of one step: a new token each for `batch` sequences of `context` tokens."""
    moved = work.weight_bytes(form, batch), float(work.cache_bytes(form, batch, context))
    return phase_limit(work, form, device, batch, moved, (1, context))


def prefill_limit(work: Work, form: Form, device: Device, batch: int, prompt: int) -> Limit:
    """Return the limit of `batch` prompts of `prompt` tokens.
    Weights are read and the cache is written once; last tokens get logits.
    """
    moved = work.weight_bytes(form, batch * prompt), float(work.cache_bytes(form, batch, prompt))
    return phase_limit(work, form, device, batch, moved, (prompt, 0))


def phase_limit(
    work: Work, form: Form, device: Device, batch: int, moved: tuple[float, float], positions: tuple[int, int]
) -> Limit:
    """Return the limit of new tokens behind a context in each sequence: `positions` of both.
    They move bytes of weights and of the KV cache; the last of each sequence goes through lm_head.
    """
    tokens, attention = batch * positions[0], work.attention_flops(batch, *positions)
    flops = work.matrix_flops(form, tokens, batch)
    products_s = sum(count / device.rate(arithmetic) for arithmetic, count in flops.items())
    compute_s = products_s + attention / device.rate(form.wide)
    return Limit(batch, tokens, *moved, sum(moved) / device.bandwidth, compute_s, sum(flops.values()), attention)


def gain(work: Work, form: Form, over: Form, device: Device, batch: int, context: int) -> float:
    """Return how many times the tokens of one form another could decode at most."""
    ours, theirs = (decode_limit(work, each, device, batch, context) for each in (form, over))
    return theirs.seconds / ours.seconds


def compute_binds_from(work: Work, form: Form, device: Device, context: int) -> int | None:
    """Return the smallest batch at which decoding is bound by arithmetic.
    None if it never is, because the cache grows faster.

    For a dense model it is W / (F B / R - K): W bytes of weights, F operations and K bytes of cache
    of a token, B bandwidth, R rate.
    """
    return _first(lambda batch: decode_limit(work, form, device, batch, context).bound_by == "compute")


def pays_until(work: Work, form: Form, over: Form, device: Device, context: int) -> int | None:
    """Return the smallest batch at which a form is less than `WORTHWHILE` times as fast as another.
    None if there is none.

    Both read the same cache and (unless it rounds its inputs too) do the same operations. So the
    gain falls with the batch: (W1 + n K) / (W2 + n K) while memory binds, to 1 if arithmetic binds
    both, n >= W1 / (F B / R - K).
    """
    return _first(lambda batch: gain(work, form, over, device, batch, context) < WORTHWHILE)


def most_sequences(work: Work, form: Form, device: Device, context: int) -> int:
    """Return the largest batch whose weights and cache fit in memory; 0 if weights alone do not."""
    free = device.memory_bytes - work.stored_bytes(form)
    each = work.cache_bytes(form, 1, context)
    return max(0, int(free // each)) if each else (MOST_SEQUENCES if free >= 0 else 0)


def _first(holds: Callable[[int], bool]) -> int | None:
    """Return the smallest batch for which something holds that, once it holds, goes on holding."""
    if not holds(MOST_SEQUENCES):
        return None
    low, high = 0, MOST_SEQUENCES
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def session_limits(
    session: Session, work: Work, device: Device, batch: int, prompt: int, context: int
) -> tuple[Limit, Limit]:
    """Return the limits of prefill and of a decode step.
    Prefill has `batch` prompts of `prompt` tokens, decoding `context` tokens in each sequence.
    """
    device = _together(device, len(set(devices_of(session))))
    form = parse_form(STORED, NAMES.get(str(getattr(session, "product_dtype", "float32")), "fp32"))

    def moved(tokens: int) -> tuple[float, float]:
        weights = session.decode_bytes(batch, 0)
        return float(weights), float(session.decode_bytes(batch, tokens) - weights)

    prefill = phase_limit(work, form, device, batch, moved(prompt), (prompt, 0))
    return prefill, phase_limit(work, form, device, batch, moved(context), (1, context))


def _together(device: Device, count: int) -> Device:
    """Return what devices with equal shares do, as if they exchanged data in no time."""
    rates = {name: rate * count for name, rate in device.rates.items()}
    return replace(device, bandwidth=device.bandwidth * count, rates=rates, memory_bytes=device.memory_bytes * count)
