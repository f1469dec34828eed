"""Stage `auto_bits`: give each layer the form that harms the predictions least, and quantize so.
The budget is in bits, bytes or time.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, cast

from pydantic import Field, model_validator

from optkit.common.field_types import Amount, AtLeastOne, Bits, Bytes, Count, Devices, Distinct, Duration, Name
from optkit.common.frozen import digest
from optkit.devices.datasheets import DEVICES, Device, datasheet
from optkit.errors import StageError, UsageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.kept_blocks import KeptBlocks
from optkit.model.linear_layers import layers_of, select
from optkit.model.output_layer import outside_of
from optkit.model.shape import ModelShape
from optkit.packed_tensors.base import packable
from optkit.source.calibration import Calibration
from optkit.stage import Context, Cost, Format, Report, Transform
from optkit.stages.gptq import Gptq
from optkit.stages.quantizing.overrides import Override
from optkit.stages.rtn import Rtn
from optkit.stages.sensitivity.budget import Allocation, Choice, Item, make_items, tightest_budget
from optkit.stages.sensitivity.needed_memory import sensitivity_memory

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.model.skeleton import Skeleton
    from optkit.source.images import Prompts

    Inputs: TypeAlias = Tensor | Prompts

KIND = "auto_bits"
DEFAULT_CHOICES = (
    Choice(bits=4, group_size=128, symmetric=True),
    Choice(bits=4, group_size=64, symmetric=True),
    Choice(bits=4, group_size=64, symmetric=False),
    Choice(bits=4, group_size=32, symmetric=True),
    Choice(bits=4, group_size=32, symmetric=False),
    Choice(bits=8, group_size=64, symmetric=True),
)
"""What vLLM opens on GPUs; on CPUs it opens 4 bits alone. With 2 and 3 bits the sum of divergences
at 4.5 bits was 0.6% less (SmolLM2).
"""


class AutoBits(Transform):
    """Give each layer the bits and groups that hurt predictions least under a budget of size.
    Then quantize by GPTQ or RTN.

    The divergence that each layer alone causes in each form is predicted to second order (`optkit
    sensitivity` shows it). One pass over a few windows of the calibration text tells it; the choice
    with the least sum that fits is found exactly. The result is compared on held-out windows with
    the best single form that fits the budget, and the better of the two is kept.
    """

    finds_parts: ClassVar[bool] = True
    kind: ClassVar[str] = "auto_bits"
    unpacks: ClassVar[bool] = True
    example: ClassVar[str] = "- auto_bits: {average_bits: 4.5, calibration: {dataset: c4}}"
    produces: ClassVar[Format] = Format.QUANTIZED
    version: ClassVar[int] = 8
    sees_images: ClassVar[bool] = True

    average_bits: Bits | None = None
    """Most bits stored for each weight of the quantized layers, counted with scales and zero
    points. Of this, `size_bytes` and `decode_ms` give one or more: the tightest decides.
    """
    size_bytes: Bytes | None = None
    """Most bytes of all tensors of the model, those that are not quantized too, e.g. `4 GB`."""
    decode_ms: Duration | None = Field(default=None, exclude_if=lambda value: value is None)
    """Most milliseconds that the memory of `decode_device` takes for the weights of one token at
    batch 1, by its datasheet. `optkit roofline` shows it; kernels take longer."""
    decode_device: Name | None = Field(default=None, exclude_if=lambda value: value is None)
    """The device of `decode_ms`, by the names of `optkit roofline --device`: `h200`, for example."""
    choices: AtLeastOne[Choice] = DEFAULT_CHOICES
    """The forms to choose from, as words (`4g64`, as `optkit sensitivity` takes them) or by their
    fields; one whose groups do not divide a layer's inputs is not offered to it. The default ones
    have 4 and 8 bits, which vLLM opens on GPUs (on CPUs: 4 bits alone); for a budget below 4.1 bits
    add some of 2 or 3 bits, which transformers opens."""
    method: Literal["gptq", "rtn"] = "gptq"
    """What rounds the weights in the end, and so what the predictions are of."""
    effort: Literal["fast", "balanced", "best"] = Field(default="fast", exclude_if=lambda value: value == "fast")
    """That of `gptq`, which rounds in the end. The predictions are those of `fast`."""
    fused: bool = True
    """Give layers that vLLM joins (q, k and v; gate and up) the same form; without it vLLM does not
    open the model. All experts always have one form, as transformers opens them."""
    include: AtLeastOne[Name] = ("*",)
    """Layers to quantize, as glob patterns on full names."""
    exclude: Distinct[Name] = ()
    """Layers to leave out of those, as glob patterns."""
    calibration: Calibration = Calibration(dataset="c4")
    """The text that GPTQ calibrates on; the sensitivities are measured on some of its windows."""
    sensitivity_samples: Count = 16
    """Windows, evenly spread over those of `calibration`, that the sensitivities are measured on."""
    held_out_samples: Amount = 8
    """Further windows of the same text, on which the result must diverge less than the best single
    form; 0 does not compare, and saves a quantization: half of the time with `effort: best`."""
    devices: Devices = Field(default=1, exclude_if=lambda value: value == 1)
    """GPUs, or on a CPU processes, that `gptq` quantizes on in the end; one measures."""

    @property
    def grid(self) -> Mapping[str, Any]:
        return {"type": "int", "rounding": "gptq" if self.method == "gptq" else "nearest"}

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if self.average_bits is self.size_bytes is self.decode_ms is None:
            raise ValueError("nothing limits the size: give average_bits, size_bytes or decode_ms")
        if (self.decode_ms is None) != (self.decode_device is None):
            raise ValueError("decode_ms and decode_device belong together: give both, or neither")
        if self.devices > 1 and self.method == "rtn":
            raise ValueError("devices share a calibration text, and rtn reads none. Leave devices out")
        if self.effort != "fast" and self.method == "rtn":
            raise ValueError(f"effort: {self.effort} is of gptq, and rtn rounds here. Leave one of them out")
        if self.effort != "fast" and self.devices > 1:
            raise ValueError(
                f"effort: {self.effort} holds the unmodified model too, on one device. Leave devices or effort out"
            )
        self._device()
        least = min(choice.bits for choice in self.choices)
        if self.average_bits is not None and self.average_bits < least:
            raise ValueError(
                f"average_bits {self.average_bits:g} is below the {least} bits of the smallest of "
                "choices. Raise it, or add one"
            )
        return self

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Measure, choose, quantize and compare.

        Raises StageError for a budget that nothing fits and for a layer that no choice fits,
        SourceError if the text is too short, and what the stages `gptq` and `rtn` raise.
        """
        from optkit.algorithms.allocation import choose
        from optkit.model.prompts import spread_over

        started = time.monotonic()
        problem = self._problem(Checkpoint(source).shape)
        tokens = _inputs(self.calibration, source, context)
        held_out = self._held_out(source, tokens, context) if self.held_out_samples else None
        kept = KeptBlocks(context.workspace, context.device, context.progress, KIND, 0)
        windows = spread_over(tokens, self.sensitivity_samples)
        costs = kept.measured("sensitivities", lambda: self._costs(source, problem.items, windows, context))
        picked = choose(costs, [item.sizes for item in problem.items], problem.budget.size_bytes)
        mixed = {
            layer.name: item.choices[index]
            for item, index in zip(problem.items, picked, strict=True)
            for layer in item.layers
        }
        uniform = {
            choice: sum(row[item.choices.index(choice)] for item, row in zip(problem.items, costs, strict=True))
            for choice in problem.uniform()
        }
        counts = Counter(choice.form.label for choice in mixed.values())
        context.progress.say(f"{KIND}: {'; '.join(f'{count} to {label}' for label, count in counts.most_common())}")
        stage = self._stage(mixed)
        report = stage.run(source, target, _beside(context, stage))
        details: dict[str, Any] = {
            "choices": {name: choice.form.label for name, choice in mixed.items()},
            "not_offered": problem.unfit(self.choices),
            "predicted_divergence": {
                "chosen": sum(row[index] for row, index in zip(costs, picked, strict=True)),
                "uniform": {choice.form.label: cost for choice, cost in uniform.items()},
            },
            "kept": "chosen",
        }
        if held_out is not None and uniform and len(set(mixed.values())) > 1:
            best = min(uniform, key=lambda choice: uniform[choice])
            report = self._keep_the_better(
                source, target, context, report, dict.fromkeys(mixed, best), held_out, details
            )
        details = {**report.details, **details, "seconds": round(time.monotonic() - started, 2)}
        return replace(report, details=details, calibrated_on=(self.calibration.identity(),))

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return what the largest choices of one kind that fit would take.
        Which ones it will be is known after the measuring.

        Raises StageError as `run` does.
        """
        problem = self._problem(shape)
        fitting = problem.uniform()
        sizes = {
            choice: sum(choice.size_bytes(layer, "F32") for layer in problem.selection.layers.values())
            for choice in fitting
        }
        form = max(sizes, key=lambda choice: sizes[choice]) if sizes else None
        guess = {
            layer.name: form or item.choices[min(range(len(item.sizes)), key=item.sizes.__getitem__)]
            for item in problem.items
            for layer in item.layers
        }
        cost, left = self._stage(guess).predict(shape, device)
        windows, length = self.calibration.size
        seen = min(self.sensitivity_samples, windows) * length
        ram, gpu = sensitivity_memory(shape, problem.selection.layers, seen, len(self.choices), device)
        copies = 2 if self.held_out_samples else 1
        more = {
            "ram_bytes": max(cost.ram_bytes, ram),
            "gpu_bytes": max(cost.gpu_bytes, gpu),
            "disk_bytes": copies * cost.disk_bytes,
            "kept_bytes": copies * cost.kept_bytes,
        }
        return cost.model_copy(update=more), left

    def _device(self) -> Device | None:
        if self.decode_device is None:
            return None
        try:
            return datasheet(self.decode_device)
        except UsageError as error:
            names = ", ".join(DEVICES)
            raise ValueError(f"decode_device '{self.decode_device}' is none of {names}. Take one of them") from error

    def _problem(self, shape: ModelShape) -> Allocation:
        chosen = select(layers_of(shape), tuple(outside_of(shape)), self.include, self.exclude, KIND)
        selection = packable(chosen, lambda _: self.choices[0].form, KIND)
        items = make_items(selection.layers, shape, self.choices, self.fused, KIND)
        limits = (self.average_bits, self.size_bytes, self.decode_ms)
        budget = tightest_budget(items, shape, *limits, self._device())
        budget.refuse_idle(items, KIND)
        return Allocation(selection, items, budget)

    def _costs(self, source: Path, items: Sequence[Item], tokens: Inputs, context: Context) -> list[list[float]]:
        """Return the predicted divergence of each item under each of its choices, nats per token."""
        from optkit.stages.sensitivity.measure import grids_of, measure_sensitivity

        skeleton = _skeleton(source, context)
        forms = {layer.name: [choice.form for choice in item.choices] for item in items for layer in item.layers}
        grids = grids_of(skeleton.checkpoint, forms)
        measured = measure_sensitivity(
            skeleton, tokens, grids, self.method, context.device, context.progress, context.seed
        )
        return [
            [sum(costs) for costs in zip(*(measured[layer.name] for layer in item.layers), strict=True)]
            for item in items
        ]

    def _stage(self, choices: Mapping[str, Choice]) -> Gptq | Rtn:
        """Return the stage that gives each layer its form."""
        usual = Counter(choices.values()).most_common(1)[0][0]
        others = {name: _override(choice) for name, choice in choices.items() if choice != usual}
        fields: dict[str, Any] = {
            **usual.model_dump(),
            "overrides": others,
            "include": self.include,
            "exclude": self.exclude,
        }
        if self.method == "rtn":
            return Rtn(scale_search="mse", **fields)
        return Gptq(calibration=self.calibration, devices=self.devices, effort=self.effort, **fields)

    def _keep_the_better(
        self,
        source: Path,
        target: Path,
        context: Context,
        report: Report,
        uniform: Mapping[str, Choice],
        windows: Inputs,
        details: dict[str, Any],
    ) -> Report:
        """Quantize with a single form too, and leave in `target` the model that diverges less.
        Held-out windows decide. Returns its report.
        """
        from optkit.model.prompts import tokens_in
        from optkit.stages.sensitivity.held_out import mean_divergences

        label = next(iter(uniform.values())).form.label
        context.progress.say(f"{KIND}: quantizing with {label} throughout, to compare")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}.uniform-") as directory:
            other = Path(directory)
            stage = self._stage(uniform)
            simpler = stage.run(source, other, _beside(context, stage))
            copies = [Checkpoint(target), Checkpoint(other)]
            chosen, single = mean_divergences(
                _skeleton(source, context), copies, windows, context.device, context.progress
            )
            details["held_out_divergence"] = {"chosen": chosen, label: single, "tokens": tokens_in(windows)}
            if chosen <= single:
                context.progress.say(
                    f"{KIND}: the choice is kept: on held-out text it diverges by {chosen:.4g} nats, "
                    f"{label} throughout by {single:.4g}"
                )
                return report
            context.progress.warn(
                f"{KIND}: {label} throughout is kept: on held-out text it diverges by {single:.4g} "
                f"nats, the choice by {chosen:.4g}"
            )
            details["kept"] = label
            shutil.rmtree(target)
            shutil.copytree(other, target)
        return simpler

    def _held_out(self, source: Path, tokens: Inputs, context: Context) -> Inputs:
        """Return windows of the calibration text that nothing was calibrated on, or such prompts.
        Windows are int64 [held_out_samples, sequence_length].
        """
        from optkit.stages.sensitivity.held_out import unseen_among

        more = self.calibration.model_copy(update={"samples": self.calibration.samples + self.held_out_samples})
        windows = _inputs(more, source, context)
        unseen = unseen_among(windows, tokens)
        if len(unseen) < self.held_out_samples:
            raise StageError(
                f"{len(unseen)} of {len(windows)} windows are not among those that were calibrated on",
                where=f"{KIND}.held_out_samples",
                why="The text repeats itself",
                remedy="Take a longer text, or set held_out_samples: 0",
            )
        return windows[unseen[-self.held_out_samples :]]


def _skeleton(source: Path, context: Context) -> Skeleton:
    import torch

    from optkit.model.skeleton import Skeleton

    return Skeleton(Checkpoint(source), dtype=torch.float32, trust_remote_code=context.trust_remote_code)


def _beside(context: Context, stage: Gptq | Rtn) -> Context:
    """Return the context of a quantization, whose finished blocks no other choice of forms takes for its own."""
    place = context.workspace and context.workspace / digest(stage.model_dump(mode="json"))
    return replace(context, workspace=place)


def _override(choice: Choice) -> Override:
    return Override(bits=choice.bits, group_size=choice.group_size or -1, symmetric=choice.symmetric)


def _inputs(calibration: Calibration, source: Path, context: Context) -> Inputs:
    return cast("Inputs", calibration.inputs(source, context.data, context.trust_remote_code))
