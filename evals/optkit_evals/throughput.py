"""How fast a model answers: prefill and decode apart, latencies and peak memory.
It also measures energy, and the bandwidth that decoding reaches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, ClassVar, Literal, cast

from optkit.common.field_types import AtLeastOne, BatchSize, Count, Duration, Length, SequenceLength, Several, Share
from optkit.common.statistics import mean, quantile, standard_error
from optkit.devices.gpu_watch import GpuWatch, devices_of
from optkit.environment import device_name
from optkit.measure import EvalContext, Metric, ProposingSession, Session, TimedEval
from optkit.model.session_memory import SessionMemory
from optkit.model.task import GENERATING, Task
from optkit_evals.configurations import measure_each
from optkit_evals.meanings import row
from optkit_evals.repeats import CALM, MOST_REPEATS, Cell, Effort, Repeats, repeat
from optkit_evals.timing import SETTLED, check_room, device_text
from optkit_evals.vllm import Asked, UnderVllm, check_vllm, time_vllm, vllm_text, vllm_versions

WIDE_SPREAD = 0.10
"""Standard deviation over mean of the repeats, from which on the user is warned."""
REMEDY = "Lower batch_sizes, prompts or new_tokens"


class Throughput(TimedEval):
    """Prefill and decode tokens per second, time to first token, inter-token latency.
    It also gives peak memory, energy and achieved bandwidth.
    """

    kind: ClassVar[str] = "throughput"
    example: ClassVar[str] = "- throughput: {batch_sizes: [1, 8], prompts: [512], new_tokens: 128}"
    version: ClassVar[int] = 7
    for_tasks: ClassVar[frozenset[Task]] = GENERATING
    sets_length: ClassVar[tuple[str, ...]] = ("prompts", "new_tokens")
    reads_weights: ClassVar[bool] = cast("bool", UnderVllm())
    metrics: ClassVar[Mapping[str, str]] = {
        "prefill_tokens_per_s": "tokens/s",
        "decode_tokens_per_s": "tokens/s",
        "time_to_first_token_s": "s",
        "inter_token_p50_s": "s",
        "inter_token_p95_s": "s",
        "inter_token_p99_s": "s",
        "decode_bytes_per_s": "bytes/s",
        "peak_memory_bytes": "bytes",
        "peak_reserved_bytes": "bytes",
        "energy_per_token_j": "J",
    }

    batch_sizes: AtLeastOne[BatchSize] = (1,)
    """Sequences at once; each is measured with each prompt length."""
    prompts: AtLeastOne[Length] = (128,)
    """Prompt lengths in tokens."""
    new_tokens: SequenceLength | AtLeastOne[SequenceLength] = 64
    """Tokens generated after the prompt; with several, each is measured with each batch and prompt."""
    repeats: Several = 8
    """Measured runs of all turns together, at least; more follow in a turn, up to four times as
    many, until its means are certain.
    """
    interval: Share = 0.02
    """How large the standard errors of a turn's prefill and decode may be, as a fraction of their
    means, before its repeats stop. The repeats alone then make the mean of four turns uncertain by
    about as much."""
    limit_s: Duration = 60.0
    """Seconds of one configuration, all turns of a model together, for repeats and for warm-up runs
    beyond `warmup`. After them none begins, but for the first repeat of a turn.
    """
    warmup: Count = 2
    """Runs before these in each turn, at least; more follow until the mean of the last two moves by
    less than 3%.
    """
    engine: Literal["optkit", "vllm"] = "optkit"
    """`vllm`: the same artifact under vLLM, in the Python that `$OPTKIT_VLLM_PYTHON` names, started
    anew in each turn; settings do not apply there, and `repeats` are as many as asked for. Its rows
    have the label `engine`."""

    def cells(self) -> list[Cell]:
        """Return every configuration, in the order of the rows."""
        lengths = (self.new_tokens,) if isinstance(self.new_tokens, int) else self.new_tokens
        engine = "" if self.engine == "optkit" else self.engine
        return [Cell(*each, engine) for each in product(self.batch_sizes, self.prompts, lengths)]

    def circumstances(self, device: str) -> dict[str, Any]:
        """Return, of another engine, the Python that has it and its versions there."""
        return {} if self.engine == "optkit" else vllm_versions()

    def told_apart(self) -> bool:
        """Return whether optkit's own sessions are timed; vLLM has one engine for all models."""
        return self.engine == "optkit"

    def check(self, device: str) -> None:
        """Raise MissingPackageError, before anything runs, if the engine is not installed."""
        if self.engine == "vllm":
            check_vllm(device)

    def row_labels(self) -> tuple[dict[str, int | str], ...]:
        return tuple(cell.labels for cell in self.cells())

    def unmeasured(self, device: str) -> Mapping[str, str]:
        """Return energy and reserved memory, which a CPU does not tell."""
        why = "a CPU does not tell it"
        return {"energy_per_token_j": why, "peak_reserved_bytes": why} if device == "cpu" else {}

    def longest_sequence(self) -> int:
        return max(cell.prompt + cell.new_tokens for cell in self.cells())

    def working_bytes(self, model: SessionMemory) -> int:
        """Return what the largest configuration needs: a prompt, its last logits, keys and values."""
        return max(
            model.forward(cell.batch, cell.prompt)
            + 2 * model.logits(cell.batch)
            + model.cache(cell.batch, cell.prompt + cell.new_tokens)
            for cell in self.cells()
        )

    def run(self, session: Session, context: EvalContext) -> list[Metric]:
        """Measure. A configuration that does not fit into memory is marked and the next one
        measured.

        Raises EvalError if the model has too few positions, ResourceError if memory runs out
        in every configuration.
        """
        longest = max(self.cells(), key=lambda cell: cell.prompt + cell.new_tokens)
        check_room(session, longest.prompt, longest.new_tokens, "throughput", "Shorten prompts or new_tokens")
        watch = GpuWatch.of_all(devices_of(session))
        if others := watch.others():
            context.warn(f"throughput: {others}, and the numbers are shared with it")
        protocol = self._protocol(session, context.seed)
        if self.engine == "vllm":
            return self._run_vllm(session, context, protocol)
        cells, share = self.cells(), context.turn.share(self.repeats)
        effort = Effort(self.warmup, share, self.interval, self.limit_s / context.turn.count)
        with context.progress.task(f"throughput{context.turn.label}", len(cells) * share, "runs") as task:

            def measure(cell: Cell) -> list[Metric]:
                return self._metrics(session, cell, repeat(session, cell, effort, context, watch, task), protocol)

            found = measure_each(cells, measure, session, context, "throughput", REMEDY)
        for warning in watch.warnings():
            context.warn(f"throughput: {warning}")
        if note := watch.note():
            context.notes.append(f"throughput: {note}")
        return found

    def _run_vllm(self, session: Session, context: EvalContext, protocol: str) -> list[Metric]:
        """Measure all configurations with one engine of vLLM; raises EvalError with its last words."""
        cells = self.cells()
        asked = Asked(
            cells=[(cell.batch, cell.prompt, cell.new_tokens) for cell in cells],
            warmup=self.warmup,
            repeats=context.turn.share(self.repeats),
            limit_s=self.limit_s / context.turn.count,
            seed=context.seed,
        )
        with context.progress.task("throughput under vLLM", 1, "runs") as task:
            measured = time_vllm(session, asked, context)
            task.advance()
        return [
            row
            for cell, repeats in zip(cells, measured, strict=True)
            for row in self._metrics(session, cell, repeats, protocol)
        ]

    def pool(self, turns: Sequence[Sequence[Metric]], context: EvalContext) -> list[Metric]:
        """Return the metrics of all turns as one measurement's; warn if the turns lie far apart."""
        found = super().pool(turns, context)
        for cell in self.cells():
            values = {metric.name: metric.samples for metric in found if metric.labels == cell.labels}
            pairs = zip(values["time_to_first_token_s"], values["decode_tokens_per_s"], strict=True)
            times = [first_s + cell.batch * (cell.new_tokens - 1) / rate for first_s, rate in pairs]
            if len(times) > 1 and (spread := standard_error(times) * len(times) ** 0.5 / mean(times)) > WIDE_SPREAD:
                context.warn(
                    f"throughput, {cell}: the times of the {len(times)} turns spread by {spread:.0%} of their mean;"
                    f" run again with --retime on a quiet machine"
                )
        return found

    def _metrics(self, session: Session, cell: Cell, measured: Repeats, protocol: str) -> list[Metric]:
        timings, batch, decoded = measured.timings, cell.batch, cell.new_tokens - 1
        count_bytes = session.token_bytes if isinstance(session, ProposingSession) else session.decode_bytes
        step_bytes = count_bytes(batch, cell.prompt + cell.new_tokens // 2)
        samples = {
            "prefill_tokens_per_s": [batch * cell.prompt / each.first_token_s for each in timings],
            "decode_tokens_per_s": [batch * decoded / each.decode_s for each in timings],
            "time_to_first_token_s": [each.first_token_s for each in timings],
            **{
                f"inter_token_p{percent}_s": [quantile(each.between_tokens_s, percent / 100) for each in timings]
                for percent in (50, 95, 99)
            },
            "decode_bytes_per_s": [step_bytes * decoded / each.decode_s for each in timings],
        }
        peak, tokens = measured.peak, batch * cell.new_tokens * len(timings)
        counts = {
            "peak_memory_bytes": peak.size_bytes,
            "peak_reserved_bytes": peak.reserved_bytes,
            "energy_per_token_j": None if measured.energy_j is None else measured.energy_j / tokens,
        }
        told: dict[str, Any] = {"labels": cell.labels, "pairing": "paired_turns"}
        found = [row(self, name, mean(values), protocol, values, **told) for name, values in samples.items()]
        return found + [row(self, name, value, protocol, **told) for name, value in counts.items() if value is not None]

    def _protocol(self, session: Session, seed: int) -> str:
        """Say how it was measured, in the same words for both models and all engines."""
        gpu = session.device != "cpu"
        memory = "memory that torch allocated (and reserved)" if gpu else "resident set of the process"
        if self.engine == "vllm":
            return self._vllm_protocol(seed, device_name(session.device))
        clock = "CUDA events behind each token (other engines than torch: wall clock)" if gpu else "wall clock"
        energy = "; energy is the GPU's own count over the repeats, prefill included, for each new token" if gpu else ""
        return (
            f"random token ids (seed {seed}), greedy, no early stop; {self.turns_text()};"
            f" in each {self.warmup} warm-up runs and more until the mean of the last two moves by less "
            f"than {SETTLED:.0%}, then the mean"
            f" of {math.ceil(self.repeats / self.turns())} repeats (of their percentiles, for latencies), and of up to"
            f" {MOST_REPEATS} times as many until the standard errors of prefill and decode are "
            f"within {self.interval:.0%}, as long as {self.limit_s / self.turns():g} s are not over;"
            f" on CPUs no repeat during which others used more than {CALM:.0%} of the cores, where enough are left;"
            f" {clock}, each token computed from the one before; prefill is up to the first token, decode after it;"
            f" bytes are the fewest that a new token makes read, of a draft too;"
            f" memory is the largest {memory} during the repeats{energy}; {device_text(session.device)}"
        )

    def _vllm_protocol(self, seed: int, device: str) -> str:
        return (
            f"{vllm_text()}; random token ids (seed {seed}), greedy, no early stop, prefix caching off (and on"
            f" CPUs its compiler); {self.turns_text()}; in each {self.warmup} warm-up runs and more until "
            "the mean of the last two moves by"
            f" less than {SETTLED:.0%}, then the mean of {math.ceil(self.repeats / self.turns())} repeats;"
            f" wall clock at each step of its engine; prefill is until all of a batch have their first token; {device}"
        )
