"""Stage `qat`: quantization-aware training.
It begins with GPTQ's codes, trains the weights behind them, and ends in codes again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from optkit.common.field_types import LearningRate
from optkit.common.frozen import Frozen, digest
from optkit.model.calibration_memory import Work
from optkit.model.linear_layers import Layer, layers_of
from optkit.model.memory import return_freed_memory
from optkit.model.output_layer import outside_of
from optkit.model.shape import ModelShape
from optkit.model.writer import SHARD_BYTES
from optkit.packed_tensors.gptq import GPTQ
from optkit.packed_tensors.integers import IntQuantized, PackedFormat
from optkit.source.calibration import Calibration
from optkit.stage import Context, Cost
from optkit.stages.gptq import Gptq
from optkit.stages.quantizing.gptq_fields import GptqFields
from optkit.stages.quantizing.integers import WeightQuantizer, packed_grid
from optkit.stages.quantizing.job import QuantizationJob
from optkit.stages.quantizing.overrides import Override
from optkit.stages.quantizing.pruned_zeros import tell_zeros
from optkit.stages.rtn import Rtn
from optkit.stages.teaching.layers import linear_modules
from optkit.stages.teaching.stage import TrainingStage
from optkit.training.memory_kinds import MemoryKinds

if TYPE_CHECKING:
    from optkit.algorithms.grid import QuantizedWeight
    from optkit.training.fake_quantization import CodedStudent
    from optkit.training.student import Student
    from optkit.training.training_report import Trainee

COPIES = 3
"""Float32 copies of a layer's weight, beside what any training has, that lie between its forward
and its backward pass.
"""
OF_GPTQ = ("calibration", "damping", "true_sequential", "scale_search", "refinements", "equal_tokens", "batch_size")
"""Fields that decide the codes to begin with, if they are those of gptq."""
BEGIN, END = "begin.safetensors", "end.safetensors"
"""Codes in front of the training, and after it."""


class QatTraining(TrainingStage):
    """How the weights behind the codes are trained."""

    kind: ClassVar[str] = "qat.training"

    learning_rate: LearningRate = 2e-5
    """Highest learning rate; that of the scales is for their logarithm."""

    def memory_with_codes(
        self,
        shape: ModelShape,
        device: str,
        origin: ModelShape | None,
        sizes: Sequence[tuple[int, int]],
        rounds_inputs: bool,
    ) -> MemoryKinds:
        """Return the peak memory of each device.
        `sizes`: (outputs, inputs) of the layers that compute with codes.

        The rounded weights of all layers lie there until the backward pass, and so do the rounded
        inputs, each layer's own.
        """
        kinds, elements = self._memory(shape, device, origin=origin), [outputs * inputs for outputs, inputs in sizes]
        weights = 4 * sum(elements) + 4 * COPIES * max(elements)
        widths = [inputs for _, inputs in sizes] if rounds_inputs else [0]
        positions = self.batch_size // self.devices * self.sequence_length
        element = 2 if self.precision == "bfloat16" else 4
        inputs = element * positions * (max(widths) if self.gradient_checkpointing else sum(widths))
        more = {"computed_weights": kinds.computed_weights + weights, "activations": kinds.activations + inputs}
        return kinds.model_copy(update=more)


class QatTrainer(QatTraining):
    """The training itself, by one process or several: what `Qat` adds to the user's fields."""

    codes: Path
    """File with the codes to begin with."""
    begun: str
    """What decided them."""
    scales: Literal["learned", "fixed", "recomputed"]
    rounds_inputs: bool
    keep_zeros: bool | Literal["auto"]

    def _student(self, source: Path, context: Context) -> CodedStudent:
        from optkit.training.code_files import read_codes
        from optkit.training.fake_quantization import code_student

        student = super()._student(source, context)
        starts, grids, _ = read_codes(self.codes)
        modules = {place: layer.name for place, layer in linear_modules(student).items() if layer.name in starts}
        coded = code_student(student, modules, starts, grids, self.scales, self.rounds_inputs)
        if self.keep_zeros:
            coded.keep_zeros_(of_all=self.keep_zeros is True)
        return coded

    def _trainee(self, student: Student, source: Path, context: Context) -> Trainee:
        return replace(super()._trainee(student, source, context), adapter_elements=None, frozen_head=True)

    def _deciding(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"codes"})

    def _expected(self, student: Student, trainee: Trainee, device: str) -> MemoryKinds:
        sizes = [(layer.out_features, layer.in_features) for layer in student.layers.values()]  # type: ignore[attr-defined]
        return self.memory_with_codes(trainee.shape, device, trainee.teacher, sizes, self.rounds_inputs)

    def _write(self, student: Student, target: Path, context: Context) -> int:
        from optkit.training.code_files import write_codes
        from optkit.training.fake_quantization import CodedStudent

        assert isinstance(student, CodedStudent)
        codes = student.codes()
        zeros = sum(int((codes[name].dequantize() == 0).sum()) for name in student.pruned)
        write_codes(target / END, codes, {name: layer.grid for name, layer in student.layers.items()}, {"zeros": zeros})
        return len(codes)


class Qat(GptqFields, WeightQuantizer):
    """Quantize as `gptq` does, then train the weights behind the codes (LSQ, arXiv:1902.08153).
    The unmodified model is the teacher.

    Forward passes compute with the rounded weights, and gradients go straight through the rounding.
    The codes of the best step are written: the same packed form as gptq's, for the same engines.
    """

    kind: ClassVar[str] = "qat"
    example: ClassVar[str] = "- qat: {bits: 3, training: {texts: [{dataset: c4}], tokens: 1_000_000}}"
    reads_origin: ClassVar[bool] = True
    version: ClassVar[int] = 6

    start: Literal["gptq", "rtn"] = "gptq"
    """The codes to begin with: those of gptq, or the nearest ones with the scales of least squared
    error, without calibration.
    """
    calibration: Calibration | None = Field(default=None, validate_default=True)
    """The text whose hidden states decide which errors of the codes to begin with matter: C4.
    `start: rtn` reads none.
    """
    training: QatTraining = QatTraining()
    """Texts, tokens, losses and the rest of the training."""
    scales: Literal["learned", "fixed", "recomputed"] = "learned"
    """`learned` with the weights; `fixed`: those of the start; `recomputed`: at each step those
    that reach every weight of a group.
    """
    activations: Literal["none", "dynamic"] = "none"
    """`dynamic`: engines round the inputs of the layers to 8 bits too, with a scale for each token,
    and so does the training (W8A8; with `bits: 8` and `group_size: null`)."""
    backend: Literal["optkit"] = Field(default="optkit", exclude=True)
    """optkit alone."""

    @field_validator("calibration")
    @classmethod
    def _read_by_gptq(cls, given: Calibration | None, info: ValidationInfo) -> Calibration | None:
        return Calibration(dataset="c4") if given is None and info.data.get("start") == "gptq" else given

    @model_validator(mode="after")
    def _trains_blocks(self) -> Self:
        if self.lm_head:
            raise ValueError("qat trains the layers of the decoder blocks. Leave lm_head out.")
        return self

    @model_validator(mode="after")
    def _reads_what_is_given(self) -> Self:
        fields = type(self).model_fields
        unread = [name for name in OF_GPTQ if getattr(self, name) != fields[name].default]
        if self.start == "rtn" and unread:
            raise ValueError(f"{unread[0]} would not be read: take it out, or set start: gptq")
        return self

    @model_validator(mode="after")
    def _opened_with_rounded_inputs(self) -> Self:
        if self.activations == "none":
            return self
        changes = [each for each in self.overrides.values() if isinstance(each, Override)]
        others = any(each.bits or each.group_size or each.symmetric is not None for each in changes)
        if others or self.format == GPTQ or (self.bits, self.group_size, self.symmetric) != (8, None, True):
            raise ValueError(
                "with rounded inputs engines open 8-bit codes with a scale for each output channel: "
                "set bits: 8, group_size: null,"
                " symmetric: true and format: compressed-tensors, without other bits or groups in "
                "overrides, or activations: none"
            )
        return self

    def layer_format(self, layer: Layer) -> PackedFormat:
        return self.gptq.layer_format(layer) if self.activations == "none" else IntQuantized()

    def quantized_weights(self, job: QuantizationJob) -> Iterator[Mapping[str, QuantizedWeight]]:
        from optkit.training.code_files import read_codes

        with _place(job.context) as place:
            begin, facts = self._begin(job, place / BEGIN)
            fields = {
                "codes": place / BEGIN,
                "begun": self._begun,
                "scales": self.scales,
                "keep_zeros": self.keep_zeros,
            }
            fields["rounds_inputs"] = self.activations == "dynamic"
            training = QatTrainer.model_validate(self.training.model_dump() | fields)
            report = training.run(job.source, place, job.context)
            trained, _, ended = read_codes(place / END)
        job.details |= facts["details"] | report.details
        job.notes[:] = facts["notes"]
        if counts := job.details.get("zeros"):
            counts["after"] = ended["zeros"]
            tell_zeros(job)
        job.calibrated_on = (*facts["calibrated_on"], *report.calibrated_on)
        changed = sum(int((trained[name].codes != start.codes).sum()) for name, start in begin.items())
        job.details["changed_codes"] = round(changed / sum(start.codes.numel() for start in begin.values()), 4)
        for index in range(len(job.skeleton.blocks)):
            yield {name: trained[name] for name in job.modules(index)}

    @property
    def _begun(self) -> str:
        """What decides the codes to begin with, beside the model."""
        return digest({"fields": self.model_dump(mode="json", exclude={"training"}), "version": self.version})

    def _begin(self, job: QuantizationJob, path: Path) -> tuple[dict[str, QuantizedWeight], Mapping[str, Any]]:
        """Return the codes to begin with, and what is known of them.
        A run that was killed has left them at the path.
        """
        from optkit.training.code_files import read_codes, write_codes

        if path.is_file():
            layers, _, facts = read_codes(path)
            if facts.get("begun") == self._begun:
                return layers, facts
        starts = {name: weight.on_cpu() for block in self.start_weights(job) for name, weight in block.items()}
        facts = {"begun": self._begun, "details": job.details, "notes": job.notes, "calibrated_on": job.calibrated_on}
        write_codes(path, starts, {name: packed_grid(job, name) for name in starts}, facts)
        job.inputs = None
        return_freed_memory(job.context.device)
        layers, _, facts = read_codes(path)
        return layers, facts

    def start_weights(self, job: QuantizationJob) -> Iterator[Mapping[str, QuantizedWeight]]:
        """Yield the codes to begin with, block by block."""
        if self.start == "gptq":
            return self.gptq.calibrated_weights(job)
        blocks = range(len(job.skeleton.blocks))
        return ({name: self.rtn.rounded(job, name) for name in job.modules(index)} for index in blocks)

    @cached_property
    def gptq(self) -> Gptq:
        """The quantizer whose codes are trained."""
        calibration = self.calibration or Calibration(dataset="c4")
        return Gptq(**self._fields(WeightQuantizer), **self._fields(GptqFields), calibration=calibration)

    @property
    def rtn(self) -> Rtn:
        """The quantizer that makes the codes to begin with, of `start: rtn`."""
        return Rtn(**self._fields(WeightQuantizer), scale_search="mse")

    def _fields(self, of: type[Frozen]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in of.model_fields}

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return what `predict_beside` does if the recipe starts from the model that is quantized."""
        return self.predict_beside(shape, device, shape)

    def predict_beside(self, shape: ModelShape, device: str, origin: ModelShape) -> tuple[Cost, ModelShape]:
        """Return what `gptq` leaves, and the memory and the disk space of the training.
        Checkpoints and codes count.
        """
        cost, left = super().predict(shape, device)
        training, _ = self.training.predict_beside(shape, device, origin)
        layers = self.select_layers(layers_of(shape), outside_of(shape)).layers.values()
        sizes = [(layer.outputs, layer.inputs) for layer in layers]
        kinds = self.training.memory_with_codes(shape, device, origin, sizes, self.activations == "dynamic")
        on_gpu, waiting = device.startswith("cuda"), min(left.size_bytes, SHARD_BYTES)
        needed = {
            "disk_bytes": cost.disk_bytes + training.disk_bytes - shape.size_bytes + 2 * shape.elements,
            "ram_bytes": max(
                cost.ram_bytes, waiting + (training.ram_bytes if on_gpu else self.training.devices * kinds.total)
            ),
            "gpu_bytes": max(cost.gpu_bytes, kinds.total) if on_gpu else 0,
        }
        return cost.model_copy(update=needed), left

    def working_memory(self, shape: ModelShape, layers: Mapping[str, Layer], device: str) -> Work:
        return (self.gptq if self.start == "gptq" else self.rtn).working_memory(shape, layers, device)


@contextmanager
def _place(context: Context) -> Iterator[Path]:
    """Give a directory for the codes.
    In the workspace a run that is killed leaves them to the next.
    """
    if context.workspace is None:
        with tempfile.TemporaryDirectory(prefix="optkit-codes-") as place:
            yield Path(place)
    else:
        context.workspace.mkdir(parents=True, exist_ok=True)
        yield context.workspace
