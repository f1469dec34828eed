"""Stage `qat`: quantization-aware training: GPTQ's codes, and then training of the weights behind them, ending in codes again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from optkit.model.shape import ModelShape
from optkit.stage import Context
from optkit.stages.gptq import Gptq
from optkit.stages.layer_quantizer import BlockOutput, Job
from optkit.stages.packed_format import GPTQ
from optkit.stages.rtn import Rtn
from optkit.stages.selection import Layer
from optkit.stages.student_layers import linear_modules
from optkit.stages.trained import Trained
from optkit.stages.weight_quantizer import WeightQuantizer, packed_format, packed_grid

if TYPE_CHECKING:
    from optkit.algorithms.grid import QuantizedWeight
    from optkit.training.account import Trainee
    from optkit.training.fake_quantization import CodedStudent, Scales
    from optkit.training.student import Student

COPIES = 3
"""Float32 copies of a layer's weight, beside what any training has, that lie between its forward and its backward pass."""


class CodeTraining(Trained):
    """How the weights behind the codes are trained."""

    learning_rate: float = Field(default=2e-5, gt=0)
    """Highest learning rate; that of the scales is for their logarithm."""
    devices: Literal[1] = 1  # type: ignore[assignment]
    """One."""
    _job: Job | None = PrivateAttr(default=None)
    _starts: Mapping[str, QuantizedWeight] = PrivateAttr(default_factory=dict)
    _scales: Scales = PrivateAttr(default="learned")
    _codes: dict[str, QuantizedWeight] = PrivateAttr(default_factory=dict)

    @property
    def _kind(self) -> str:
        return "qat.training"

    def train(self, job: Job, starts: Mapping[str, QuantizedWeight], scales: Scales) -> dict[str, QuantizedWeight]:
        """Return the codes after the training, by layer; what is known of it goes into the job. Raises what `Trained.run` raises."""
        training = self.model_copy()
        training._job, training._starts, training._scales, training._codes = job, starts, scales, {}
        report = training.run(job.source, job.source, job.context)
        job.details |= report.details
        job.calibrated_on = (*job.calibrated_on, *report.calibrated_on)
        return training._codes

    def _student(self, source: Path, context: Context) -> CodedStudent:
        from optkit.training.fake_quantization import code_student

        assert self._job is not None
        job = self._job
        student = super()._student(source, context)
        modules = {place: layer.name for place, layer in linear_modules(student).items() if layer.name in self._starts}
        grids = {name: packed_grid(job, name) for name in self._starts}
        return code_student(student, modules, self._starts, grids, self._scales)

    def _trainee(self, student: Student, source: Path, context: Context) -> Trainee:
        return replace(super()._trainee(student, source, context), adapter_elements=None)

    def _write(self, student: Student, target: Path, context: Context) -> int:
        self._codes.update(student.codes())  # type: ignore[attr-defined]
        return len(self._codes)


class Qat(Gptq):
    """Quantize as `gptq` does, then train the weights behind the codes so that the model says what it said before (LSQ, arXiv:1902.08153).

    Forward passes compute with the rounded weights, gradients go straight through the rounding, and what is written are the codes of the
    best step: the same packed form as gptq's, for the same engines.
    """

    reads_origin: ClassVar[bool] = True

    training: CodeTraining = CodeTraining()
    """Texts, tokens, losses and the rest of the training."""
    start: Literal["gptq", "rtn"] = "gptq"
    """The codes to begin with: those of gptq, or the nearest ones with the scales of least squared error, without calibration."""
    scales: Literal["learned", "fixed", "recomputed"] = "learned"
    """`learned` with the weights; `fixed`: those of the start; `recomputed`: at each step those that reach every weight of a group."""
    backend: Literal["optkit"] = "optkit"  # type: ignore[assignment]
    """optkit alone."""

    @model_validator(mode="after")
    def _trains_blocks(self) -> Self:
        if self.lm_head:
            raise ValueError("qat trains the layers of the decoder blocks. Leave lm_head out.")
        return self

    def _blocks(self, job: Job) -> Iterator[BlockOutput]:
        starts = self._starts(job)
        if job.context.device != "cpu":
            import torch

            torch.cuda.empty_cache()
        trained = self.training.train(job, starts, self.scales)
        changed = sum(int((trained[name].codes != start.codes.cpu()).sum()) for name, start in starts.items())
        job.details["changed_codes"] = round(changed / sum(start.codes.numel() for start in starts.values()), 4)
        for index in range(len(job.skeleton.blocks)):
            yield BlockOutput(self._packed(job, {name: trained[name] for name in job.modules(index)}))

    def _starts(self, job: Job) -> dict[str, QuantizedWeight]:
        """Return the codes to begin with."""
        from optkit.algorithms.packing import unpack_compressed_tensors, unpack_gptq

        if self.start == "gptq":
            outputs = super()._blocks(job)
        else:
            shared = {name: getattr(self, name) for name in WeightQuantizer.model_fields}
            outputs = Rtn(**shared, scale_search="mse")._blocks(job)
        read = unpack_gptq if self.format == GPTQ else unpack_compressed_tensors
        starts = {}
        for output in outputs:
            for name, tensors in output.layers.items():
                found = read(tensors, packed_format(job, name).bits)
                starts[name] = replace(found, scales=found.scales.float())
        job.inputs = None
        return starts

    def _memory(self, shape: ModelShape, layers: Mapping[str, Layer], device: str) -> tuple[int, int]:
        ram, gpu = super()._memory(shape, layers, device)
        training, _ = self.training.predict(shape, device)
        largest = max(layer.outputs * layer.inputs for layer in layers.values())
        held = 4 * sum(layer.outputs * layer.inputs for layer in layers.values()) + 4 * COPIES * largest
        if device.startswith("cuda"):
            return max(ram, training.ram_bytes), max(gpu, training.gpu_bytes + held)
        return max(ram, training.ram_bytes + held), gpu
