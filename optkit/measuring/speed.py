"""Where the speed of an artifact comes from: its engine, its settings, and each stage.

Further models are timed in turns with the unmodified one and the artifact. The most important one
is the unmodified weights in the artifact's engine and with its settings (`same engine`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optkit.execute import materialize
from optkit.kernels.cpu.families import DECODES, why_not_config
from optkit.keys import make_metric_key, settings_identity
from optkit.measure import Metric
from optkit.measuring.bench import Subject, Wanted, known
from optkit.measuring.measurement import Measurement
from optkit.measuring.turns import TimedModel
from optkit.plan import Plan, PlannedEval, Step
from optkit.recipe.gates import parse_gate
from optkit.recipe.recipe import EvalEntry, SettingEntry
from optkit.recipe.registry import stage_class
from optkit.scorecard import Rung
from optkit.source.models import model_shape
from optkit.stage import Context, Format, exclusion
from optkit.store.store import Store

UNMODIFIED, ENGINE, SAME_ENGINE = "unmodified", "engine", "same engine"
DECODER = "cpu_decoder"
"""The setting by which float weights are decoded as packed ones are on a CPU."""


@dataclass(frozen=True)
class SpeedRung:
    """A further model: the weights of a step, opened with settings."""

    name: str
    index: int
    """Of the step that leaves its weights."""
    settings: tuple[SettingEntry, ...]
    wanted: Wanted


@dataclass(frozen=True)
class SpeedRungs:
    """What is timed beside the unmodified model and the artifact, in the order of a waterfall."""

    rungs: tuple[SpeedRung, ...] = ()
    engine_is_shared: bool = True
    """The unmodified model alone is in the artifact's engine and settings already."""
    kernels_assumed: bool = False
    """The artifact's packed weights should be decoded by optkit's CPU kernels; its session says
    whether they are.
    """

    def known(self, store: Store) -> SpeedRungs:
        """Return those whose numbers are in the store."""
        rungs = tuple(rung for rung in self.rungs if all(known(store, key) for key, _ in rung.wanted))
        return replace(self, rungs=rungs)

    @property
    def keys(self) -> list[str]:
        """The keys of all their numbers."""
        return [key for rung in self.rungs for key, _ in rung.wanted]

    def further(self, plan: Plan, store: Store, context: Context) -> list[TimedModel]:
        """Return them as models to be timed."""
        return [TimedModel(_subject(rung, plan, store, context), rung.wanted, rung.name) for rung in self.rungs]

    def same_engine(self, measured: Measurement) -> Sequence[Metric] | None:
        """Return the numbers of the unmodified model in the artifact's engine and settings.
        None if they are those of the baseline.
        """
        return None if self.engine_is_shared else dict(self._told(measured)).get(SAME_ENGINE, ())

    def waterfall(self, plan: Plan, measured: Measurement) -> tuple[Rung, ...]:
        """Return the rates of the model, of each further one and of the artifact.
        It is nothing if no further one was measured.
        """
        told = [(name, metrics) for name, metrics in self._told(measured) if metrics]
        if not told:
            return ()
        names = {each.name for _, metrics in told for each in metrics if each.unit == "tokens/s"}
        ladder = [(UNMODIFIED, measured.baseline), *told, (plan.steps[-1].kind, measured.metrics)]
        return tuple(
            Rung(stage=name, metrics=tuple(each for each in metrics if each.name in names)) for name, metrics in ladder
        )

    def _told(self, measured: Measurement) -> Sequence[tuple[str, tuple[Metric, ...]]]:
        return () if self.kernels_assumed and DECODES not in measured.notes else measured.further


def speed_rungs(plan: Plan, *, stages: bool) -> SpeedRungs:
    """Return what is to be timed further, so far as the recipe asks for it: nothing without an eval
    that is told apart.

    `stages`: the directories between the model and the artifact can be had.
    """
    timed = [each for each in plan.evals if each.eval.told_apart()]
    asked = any(parse_gate(key, text).of == "same engine" for key, text in plan.recipe.gates.items())
    if not timed or not (asked or plan.recipe.attribution) or plan.artifact_key == plan.baseline_key:
        return SpeedRungs()
    engine, settings = _engine(plan), plan.recipe.settings
    others = tuple(entry for entry in settings if entry not in engine and entry.value.applies(plan.device))
    everything = (*settings, *(entry for entry in engine if entry not in settings))
    exported = plan.steps[-1].format == Format.ONNX != plan.steps[0].format
    found: list[tuple[str, int, tuple[SettingEntry, ...]]] = []
    first = 1
    if exported:
        first = next(index for index, step in enumerate(plan.steps) if step.format == Format.ONNX)
        if first == 1 and len(plan.steps) > 2:
            found.append((SAME_ENGINE, 1, everything))
    elif len(plan.steps) > 1 and (engine or others):
        if engine and others and plan.recipe.attribution:
            found.append((ENGINE, 0, (*plan.baseline_settings, *engine)))
        found.append((SAME_ENGINE, 0, everything))
    if stages and plan.recipe.attribution:
        start = first + 1 if exported and first == 1 else 1
        found += [(plan.steps[index].kind, index, everything) for index in range(start, len(plan.steps) - 1)]
    rungs = [
        SpeedRung(name, index, applied, [(_key(plan, each, plan.steps[index], applied), each) for each in timed])
        for name, index, given in found
        for applied in [tuple(entry for entry in given if entry.value.fits(plan.steps[index].format))]
    ]
    assumed = any(entry.kind == DECODER for entry in engine if entry not in settings)
    return SpeedRungs(tuple(rungs), not (exported or engine or others), assumed)


def _engine(plan: Plan) -> tuple[SettingEntry, ...]:
    """Return the settings that decide what computes the artifact's decode steps.
    Packed weights on a CPU are decoded by optkit's kernels without any, float ones with
    `cpu_decoder`.
    """
    chosen = tuple(entry for entry in plan.recipe.settings if entry.value.step_mode(plan.device))
    if chosen or plan.device != "cpu" or plan.steps[-1].format != Format.QUANTIZED:
        return chosen
    decoder = SettingEntry.model_validate({"kind": DECODER, "value": stage_class(DECODER)()})
    together = [*(entry.value for entry in plan.recipe.settings), decoder.value]
    config = model_shape(plan.recipe.model, plan.steps[0].directory).config
    return (decoder,) if why_not_config(config) is None and exclusion(together, plan.device) is None else ()


def _key(plan: Plan, each: PlannedEval, step: Step, settings: Sequence[SettingEntry]) -> str:
    decisive = plan.together.circumstances(plan.device) | each.eval.circumstances(plan.device)
    entry = EvalEntry(kind=each.kind, value=each.eval)
    beside = {"beside": plan.artifact_key if len(plan.together.keys) <= 2 else plan.together.beside("")}
    return make_metric_key(entry, plan.recipe.seed, step.key, settings_identity(settings), decisive | beside)


def _subject(rung: SpeedRung, plan: Plan, store: Store, context: Context) -> Subject:
    def weights() -> Path:
        return materialize(plan, rung.index, store, context, set())

    return Subject(weights, [entry.value for entry in rung.settings], context.trust_remote_code)
