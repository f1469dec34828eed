"""Scorecards of models that were never made: every section of a page has something to show."""

import math
import random
from collections.abc import Sequence
from pathlib import Path

from optkit.devices.memory_watch import MemoryTrace
from optkit.measure import Metric
from optkit.scorecard import Rung, Scorecard, StepLine, build_scorecard
from tests.support.scorecards import metric

PARTS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
LABELS: dict[str, int | str] = {"batch": 1, "prompt": 128}
TIMED = "random token ids, greedy; mean of 4 turns"


def perplexity(loss: float, *, seed: int = 0) -> Metric:
    """Return a perplexity of 12 windows: those of one seed lie on the same text."""
    noise = random.Random(seed)
    losses = [loss + noise.gauss(0, 0.1) for _ in range(12)]
    value = math.exp(sum(losses) / len(losses))
    text = "python-reference test, 12 windows of 1024 tokens"
    interval = (value * 0.93, value * 1.07)
    return metric(
        "perplexity", value, "perplexity", text, interval=interval, samples=tuple(losses), pairing="paired_log"
    )


def divergence(value: float) -> Metric:
    """Return a mean divergence from the unmodified model."""
    text = "python-reference test, 4 windows of 1024 tokens; KL(baseline || model)"
    interval = (value * 0.8, value * 1.2)
    return metric("kl_divergence", value, "nats/token", text, interval=interval)


def timed(name: str, value: float, unit: str, *, higher: bool = True, seed: int = 1) -> Metric:
    """Return a timing of four turns with three repeats each."""
    noise = random.Random(seed)
    turns = tuple(tuple(value * noise.uniform(0.97, 1.03) for _ in range(3)) for _ in range(4))
    samples = tuple(sum(turn) / len(turn) for turn in turns)
    told = {"labels": LABELS, "samples": samples, "repeats": turns, "pairing": "paired_turns"}
    interval = min(samples), max(samples)
    return metric(name, sum(samples) / 4, unit, TIMED, higher_is_better=higher, interval=interval, **told)


def count(name: str, value: float, unit: str = "bytes") -> Metric:
    """Return a number without error."""
    return metric(name, value, unit, "counted")


def timings(factor: float) -> list[Metric]:
    """Return what `throughput` and `roofline` measure of a model that is so many times faster than 63 tokens/s."""
    return [
        timed("decode_tokens_per_s", 63 * factor, "tokens/s"),
        timed("decode_limit_tokens_per_s", 80 * factor, "tokens/s"),
        timed("decode_of_limit", 0.79, "fraction"),
        timed("prefill_tokens_per_s", 1800, "tokens/s"),
        timed("prefill_limit_tokens_per_s", 2500, "tokens/s"),
        timed("prefill_of_limit", 0.72, "fraction"),
        timed("time_to_first_token_s", 0.0704, "s", higher=False),
        timed("inter_token_p50_s", 1 / 63 / factor, "s", higher=False),
        timed("inter_token_p95_s", 1.07 / 63 / factor, "s", higher=False),
        timed("inter_token_p99_s", 1.2 / 63 / factor, "s", higher=False),
        timed("peak_memory_bytes", 1.4e9 / factor**0.2, "bytes", higher=False),
    ]


def steps(losses: Sequence[float]) -> list[StepLine]:
    """Return a quantizer that told the error of each layer, and a training."""
    noise = random.Random(3)
    layers = {
        f"model.layers.{block}.{part}": 0.002 * (1 + index) * noise.uniform(0.4, 2.5)
        for block in range(30)
        for index, part in enumerate(PARTS)
    }
    points = [
        {"step": step, "tokens": 512 * step, "loss": loss, "learning_rate": 1e-4}
        for step, loss in enumerate(losses, start=1)
    ]
    judged = [{"step": step, "tokens": 512 * step, "loss": 2.6 - 0.004 * step} for step in (0, 50, 100)]
    training = {"points": points, "judged": judged, "steps": 100, "tokens": 51200, "seconds": 12.0}
    quantized = {"changed": 210, "skipped": {"lm_head": "outside the decoder blocks"}, "details": {"losses": layers}}
    return [
        StepLine(
            kind="gptq", key="a" * 64, cached=False, seconds=61.2, report=quantized, memory=memory("gptq", on_gpu=True)
        ),
        StepLine(
            kind="lora_recover", key="b" * 64, cached=True, seconds=12.0, report={"details": {"training": training}}
        ),
    ]


def memory(name: str, of: str = "", on_gpu: bool = False) -> MemoryTrace:
    """Return the memory of a phase of three seconds."""
    allocated = (0, 300_000_000, 200_000_000) if on_gpu else ()
    resident = (500_000_000, 900_000_000, 700_000_000)
    return MemoryTrace(name=name, of=of, seconds=(0.0, 1.5, 3.0), resident_bytes=resident, allocated_bytes=allocated)


def full_scorecard(name: str = "llama_int4", bits: int = 4) -> Scorecard:
    """Return a scorecard that fills every section."""
    harm = {3: 0.4, 4: 0.06, 8: 0.004}[bits]
    speed = {3: 6.6, 4: 5.95, 8: 3.1}[bits]
    rungs = [
        Rung(stage="unmodified", metrics=(perplexity(2.31),)),
        Rung(stage="gptq", metrics=(perplexity(2.31 + harm * 1.3), divergence(harm * 1.2))),
        Rung(stage="lora_recover", metrics=(perplexity(2.31 + harm), divergence(harm))),
    ]
    layers = [
        metric("layer_kl_divergence", 0.004 / (index + 1), "nats/token", "second order", labels={"layer": layer})
        for index, layer in enumerate(f"model.layers.{29 - index}.mlp.down_proj" for index in range(6))
    ]
    measured = [
        perplexity(2.31 + harm),
        divergence(harm),
        *timings(speed),
        count("size_bytes", 5.4e8 * (bits + 1.2) / 32),
        *layers,
    ]
    return build_scorecard(
        name=name,
        artifact_key="c" * 64,
        recipe={
            "name": name,
            "model": {"name": "smollm2-135m", "revision": "sha256:0123"},
            "stages": [{"gptq": {"bits": bits, "group_size": 32}}, {"lora_recover": {"rank": 8}}],
            "gates": {"perplexity": "<= 1.10x"},
        },
        metrics=measured,
        baseline=[perplexity(2.31), *timings(1.0), count("size_bytes", 5.4e8)],
        gates={"perplexity": "<= 1.10x", "size_bytes": "<= 0.5x", "decode_tokens_per_s": ">= 1.2x"},
        memory=[
            memory(name, of)
            for of in ("unmodified", "artifact")
            for name in ("open", "warming up", "throughput", "perplexity")
        ],
        steps=steps([3.0 - 0.5 * math.log10(1 + step) for step in range(100)]),
        attribution=rungs,
        speed=[
            Rung(stage=stage, metrics=(timed("decode_tokens_per_s", 63 * factor, "tokens/s"),))
            for stage, factor in (("unmodified", 1), ("same engine", 2.8), ("gptq", speed))
        ],
        settings=("attention: sdpa",),
        notes=("decode: each step is one call of optkit's CPU kernels",),
        environment={"device": "cpu", "device_name": "Intel(R) Xeon(R)", "torch": "2.13.0", "cpu_threads": 2},
    )


def sweep(count_of: int = 12) -> list[tuple[Path, Scorecard]]:
    """Return scorecards of recipes of different bits and groups, with their places."""
    noise = random.Random(0)
    cards = []
    for index in range(count_of):
        bits, group = (8, 4, 3)[index % 3], (32, 64, 128, 256)[index // 3 % 4]
        name = f"{'gptq' if index % 2 else 'rtn'}-{bits}-{group}" + (f"-{index}" if index >= 12 else "")
        harm = {3: 0.35, 4: 0.06, 8: 0.004}[bits] * (group / 32) ** 0.3 * (0.6 if index % 2 else 1)
        speed = {3: 6.2, 4: 5.9, 8: 3.1}[bits] * (group / 32) ** 0.03
        size = 5.4e8 * (0.25 + (bits + 32 / group) / 32 * 0.75)
        losses = perplexity(2.31 + harm)
        shaken = tuple(loss + noise.gauss(0, 0.01) for loss in losses.samples)
        value = math.exp(sum(shaken) / len(shaken))
        found = losses.model_copy(update={"samples": shaken, "value": value, "interval": (value * 0.93, value * 1.07)})
        cards.append(
            build_scorecard(
                name=name,
                artifact_key=f"{index:064x}",
                recipe={
                    "name": name,
                    "model": {"name": "smollm2-135m"},
                    "stages": [{("gptq" if index % 2 else "rtn"): {"bits": bits, "group_size": group}}],
                    "seed": index // 12,
                },
                metrics=[
                    found,
                    divergence(harm),
                    *timings(speed),
                    count("size_bytes", size),
                    count("bits_per_weight", bits + 32 / group, "bits"),
                ],
                baseline=[
                    perplexity(2.31),
                    *timings(1.0),
                    count("size_bytes", 5.4e8),
                    count("bits_per_weight", 32.0, "bits"),
                ],
                gates={"perplexity": "<= 1.10x"},
                environment={"device": "cpu", "device_name": "Intel(R) Xeon(R)", "cpu_threads": 2},
            )
        )
    return [(Path("artifacts/sweep") / card.name, card) for card in cards]
