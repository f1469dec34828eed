"""What a measurement is. A `Session` is measured, an `Eval` measures it, and `Metric`s come out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from optkit.common.attachment import Attachment as Attachment
from optkit.common.attachment import check_names
from optkit.common.field_types import Several
from optkit.common.frozen import Frozen
from optkit.common.grouping import grouped
from optkit.common.statistics import Estimate, mean, mean_estimate, share_estimate
from optkit.model.cost import Cost
from optkit.model.opened import Answering as Answering
from optkit.model.opened import AttendingSession as AttendingSession
from optkit.model.opened import ConditionalSession as ConditionalSession
from optkit.model.opened import EncoderSession as EncoderSession
from optkit.model.opened import Opened as Opened
from optkit.model.opened import ProposingSession as ProposingSession
from optkit.model.opened import QueueingSession as QueueingSession
from optkit.model.opened import SeeingSession as SeeingSession
from optkit.model.opened import Session as Session
from optkit.model.opened import SharingSession as SharingSession
from optkit.model.opened import SteppingSession as SteppingSession
from optkit.model.session_memory import SessionMemory
from optkit.model.shape import ModelShape
from optkit.model.task import Task
from optkit.progress import Progress, SilentProgress
from optkit.source.text_place import TextPlace

TURNS = 4
"""In how many turns each model is timed: the interval of four values is 3.2 standard errors to each
side, of two 12.7.
"""


class Metric(Frozen):
    """One number with its unit, its uncertainty and the protocol that it was measured by."""

    model_config = ConfigDict(allow_inf_nan=False)

    name: str
    labels: dict[str, int | str] = {}
    """What tells metrics of one name apart, e.g. `{"batch": 1, "prompt": 128}`."""
    value: float
    unit: str
    higher_is_better: bool
    interval: tuple[float, float] | None = None
    """95% interval; None for a count that has no error."""
    protocol: str
    """Everything that must be equal for two numbers to be compared."""
    samples: tuple[float, ...] = ()
    """Raw samples behind the value: window losses in nats, ...; of a timed eval the value of each
    turn, and within a turn its repeats.
    """
    repeats: tuple[tuple[float, ...], ...] = ()
    """Of a timed eval, the repeats of each turn."""
    trials: tuple[int, ...] = ()
    """Of a share, of how many trials each sample is the share."""
    pairing: Literal["exact", "paired_log", "paired_mean", "paired_turns", "independent"] = "exact"
    """How a ratio to the baseline is formed: `exact` divides the values; `paired_log` takes exp of
    the mean difference of samples that lie on the same tokens; `paired_mean` divides means of the
    same items, in the same order; `paired_turns` divides values whose samples are of neighbouring
    turns; `independent` divides values whose intervals say all."""
    failure: str = ""
    """Why there is no number, e.g. `memory ran out on cuda`; `value` is 0 then and means nothing,
    and gates on it fail."""


@dataclass(frozen=True)
class Found:
    """What an eval measured, and the files that it leaves beside the scorecard."""

    metrics: tuple[Metric, ...]
    attachments: tuple[Attachment, ...] = ()

    @classmethod
    def of(cls, wanted: Eval, session: Any, context: EvalContext) -> Found:
        """Return what an eval finds.
        Raises what `Eval.run` does, EvalError if two files have one name.
        """
        return cls.sorted(wanted.run(session, context), wanted.kind)

    @classmethod
    def sorted(cls, both: Iterable[Metric | Attachment], kind: str) -> Found:
        """Return metrics and files apart; raises EvalError if two files have one name."""
        both = list(both)
        files = tuple(each for each in both if isinstance(each, Attachment))
        check_names(files, kind)
        return cls(tuple(each for each in both if not isinstance(each, Attachment)), files)

    def to_json(self) -> dict[str, Any]:
        """Return both as JSON values."""
        metrics = [metric.model_dump(mode="json") for metric in self.metrics]
        return {"metrics": metrics, "attachments": [each.to_json() for each in self.attachments]}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Found:
        """Return what `to_json` described; numbers of before there were files have none."""
        files = tuple(map(Attachment.from_json, said.get("attachments", ())))
        return cls(tuple(map(Metric.model_validate, said["metrics"])), files)


@dataclass(frozen=True)
class Turn:
    """One of the turns in which a model is timed; its repeats are shared among them."""

    index: int = 0
    count: int = 1

    def share(self, repeats: int) -> int:
        """Return how many of the repeats belong to this turn: rounded up, as many for each."""
        return math.ceil(repeats / self.count)

    @property
    def label(self) -> str:
        """What the title of a bar ends with."""
        return f", turn {self.index + 1} of {self.count}" if self.count > 1 else ""


@dataclass(frozen=True)
class EvalContext:
    """What an eval gets beside the session."""

    seed: int = 0
    progress: Progress = field(default_factory=SilentProgress)
    data: Path | None = None
    """Directory with local copies of data sets, if the user named one."""
    baseline: Any = None
    """The unmodified model, opened as well, a session of the same kind; None for evals without
    `compares = True`.
    """
    calibrated_on: tuple[Mapping[str, str], ...] = ()
    """The texts that shaped the weights (`TextSource.identity()`); an eval refuses to measure on
    them.
    """
    turn: Turn = Turn()
    """Which share of its repeats a timed eval makes now."""
    notes: list[str] = field(default_factory=list)
    """What the scorecard must say beside the numbers."""
    warnings: list[str] = field(default_factory=list)
    """Those of the notes that ask someone to act."""

    def warn(self, line: str) -> None:
        """Print one line that asks the user to act, and keep it for the scorecard; once."""
        if line not in self.notes:
            self.progress.warn(line)
            self.notes.append(line)
            self.warnings.append(line)


class Eval(Frozen):
    """A measurement: fields are its YAML keys. `version` is raised when equal fields measure differently."""

    kind: ClassVar[str] = ""
    """How recipes and messages call it: the name of its entry point, as for a stage."""
    example: ClassVar[str] = ""
    version: ClassVar[int] = 1
    requires: ClassVar[tuple[str, ...]] = ()
    for_tasks: ClassVar[frozenset[Task]] = frozenset({Task.GENERATION})
    """The models that it can measure. The session is a `Session`, an `EncoderSession` for encoders, or
    a `ConditionalSession` for encoder-decoders."""
    compares: ClassVar[bool] = False
    """Needs the baseline session beside the artifact's, and is not run on the baseline itself."""
    contrasted: ClassVar[frozenset[str]] = frozenset()
    """Those of its metrics that `contrast` gives, which have no number of the baseline."""
    of_unmodified: ClassVar[bool] = False
    """Measures the unmodified model and nothing else: its numbers are those of all artifacts of it."""
    timed: ClassVar[bool] = False
    """Depends on the device and library versions, and is measured for artifact and baseline in the
    same run, in turns; see `TimedEval`.
    """
    draws: ClassVar[bool] = True
    """Its numbers depend on the recipe's seed, which is part of their key then."""
    reads_weights: ClassVar[bool] = False
    """Reads the tensors of a checkpoint, so that it cannot measure an ONNX model."""
    layers_alone: ClassVar[bool] = False
    """Says what each layer does alone, so that it cannot measure an adapter beside packed weights,
    which makes up for all of them.
    """
    attributed: ClassVar[bool] = False
    """Measures accuracy, so that the scorecard says what each stage of the recipe added to it."""
    metrics: ClassVar[Mapping[str, str]] = {}
    """Name and unit of the metrics that `run` returns: gates are checked before anything runs."""
    sets_length: ClassVar[tuple[str, ...]] = ()
    """The fields that `longest_sequence` comes of."""

    def row_labels(self) -> tuple[dict[str, int | str], ...]:
        """Return the labels of each row that a metric of this eval will have.
        There is one row without labels unless an eval says more.
        """
        return ({},)

    def rows_of(self, metric: str) -> tuple[dict[str, int | str], ...]:
        """Return the labels of each row of one metric, `row_labels` unless metrics differ in them."""
        return self.row_labels()

    def faults(self) -> Iterable[tuple[tuple[str | int, ...], str]]:
        """Yield what is wrong with fields on this machine: the way to the field and a sentence."""
        return ()

    def unmeasured(self, device: str) -> Mapping[str, str]:
        """Return those of its metrics that have no row on a device, each with the reason."""
        return {}

    def foresee(self, shape: ModelShape) -> Mapping[str, float]:
        """Return what is known of its metrics before a model of this shape is there; 0: it has no such number."""
        return {}

    def longest_sequence(self) -> int:
        """Return the tokens of the longest sequence that the model will get; 0 if it gets none."""
        return 0

    def working_bytes(self, model: SessionMemory) -> int:
        """Return what computing needs beside the opened models; nothing unless an eval says more."""
        return 0

    def arriving_s(self) -> float:
        """Return in how many seconds all that it answers arrives; 0 if it is there at once."""
        return 0.0

    def predict(self, model: SessionMemory, beside: SessionMemory | None = None) -> Cost:
        """Return what measuring a model needs, while another one is open `beside` it.
        Both opening it and computing with it count.
        """
        held, opened = (beside.weights, beside.opening) if beside else (0, 0)
        peak = model.weights + held + self.working_bytes(model)
        if model.device == "cpu":
            return Cost(ram_bytes=max(opened, model.opening + held, peak))
        return Cost(ram_bytes=max(opened, model.opening), gpu_bytes=peak)

    def check(self, device: str) -> None:
        """Refuse what the device or the installed packages cannot measure.
        It is asked before anything runs, without torch.

        Raises MissingPackageError, EvalError.
        """

    def check_texts(self, place: TextPlace) -> None:
        """Refuse a tokenizer that cannot be opened and texts that are too short.
        It is asked before anything is computed.

        Raises SourceError, EvalError.
        """

    def turns(self) -> int:
        """Return in how many turns a timed eval measures each model."""
        return TURNS

    def told_apart(self) -> bool:
        """Say whether it times decoding, so that the scorecard tells the engine's part of the speed
        from that of settings and stages.
        """
        return False

    def apart(self) -> bool:
        """Say whether a timed eval takes each turn in a fresh process.
        That process opens the model for it and ends.
        """
        return False

    def circumstances(self, device: str) -> dict[str, Any]:
        """Return what else decides the numbers, as JSON values and without torch.
        Device, threads and library versions decide those of a timed eval anyway.

        It is part of their key, and belongs into their protocol.
        """
        return {}

    def run(self, session: Any, context: EvalContext) -> Iterable[Metric | Attachment]:
        """Return or yield what was measured of the session, and files that say more of it.

        Raises EvalError if the number could not be had or would not be honest.
        """
        raise NotImplementedError

    def contrast(self, found: Found, baseline: Found) -> Iterable[Metric | Attachment]:
        """Return what only both say together, of a model and of the baseline; none is open then."""
        return ()

    def pool(self, turns: Sequence[Sequence[Metric]], context: EvalContext) -> list[Metric]:
        """Return the metrics of all turns of a timed eval as those of one measurement.
        What failed in one turn has failed.
        """
        metrics = (metric for turn in turns for metric in turn)
        alike = grouped(metrics, lambda metric: f"{metric.name} {sorted(metric.labels.items())}")
        return [_pooled(metrics) for metrics in alike.values()]


class TimedEval(Eval):
    """An eval whose numbers differ from process to process.
    Each model is opened anew in each of several turns, and the turns are pooled.

    `run` measures in one turn, `context.turn`. The value of a metric there, the mean of its
    repeats, is one sample of the pooled metric. Turns are independent of each other, repeats within
    a turn are not. A metric with `trials` is a share of what all turns tried, and an `exact` one
    has no error.
    """

    timed: ClassVar[bool] = True

    processes: Several = TURNS
    """Turns of each model, at most; the two models take them alternately. Each opens the model
    anew, and its value is one sample.
    """
    isolated: bool = True
    """Take each turn in a fresh Python process. So nothing that was left in this one (memory that
    it keeps, compiled code, settings of libraries) is in the numbers. What differs from process to
    process is in the interval. Each costs the seconds that torch takes to import.
    """

    def turns(self) -> int:
        return self.processes

    def apart(self) -> bool:
        return self.isolated

    def turns_text(self) -> str:
        """Say for the protocol what the value and its interval stand on."""
        opened = "each in a fresh process" if self.isolated else "each with the model opened anew"
        return f"mean of {self.turns()} turns, {opened}, alternating with those of the model that it is compared with"


def _pooled(metrics: Sequence[Metric]) -> Metric:
    first = metrics[0]
    if failed := next((metric for metric in metrics if metric.failure), None):
        return failed
    values = tuple(metric.value for metric in metrics)
    if first.pairing == "exact":
        return first.model_copy(update={"value": mean(values)})
    if first.trials:
        samples = tuple(sample for metric in metrics for sample in metric.samples)
        trials = tuple(count for metric in metrics for count in metric.trials)
        share = share_estimate(samples, trials)
        return first.model_copy(
            update={"value": share.value, "interval": share.interval, "samples": samples, "trials": trials}
        )
    most = 1.0 if first.unit == "fraction" else math.inf
    pooled = mean_estimate(values, 0.0, most) if len(values) > 1 else Estimate(values[0])
    repeats = tuple(metric.samples for metric in metrics if metric.samples)
    return first.model_copy(
        update={"value": pooled.value, "interval": pooled.interval, "samples": values, "repeats": repeats}
    )
