"""Stage `mx`: 4-bit floats in small scaled blocks, MXFP4 or NVFP4."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from optkit.common.field_types import BatchSize
from optkit.common.grouping import grouped
from optkit.common.out_of_resources import out_of_memory
from optkit.errors import StageError
from optkit.model.calibration_memory import Work, calibrated_work, hessian_bytes, less_memory
from optkit.model.checkpoint import Checkpoint
from optkit.model.linear_layers import EXPERTS, Layer, Selection, layers_of
from optkit.model.packed_floats import stacked_experts
from optkit.model.shape import DTYPE_BITS, ModelShape, TensorInfo
from optkit.model.task import WEIGHTS_ALONE, Task
from optkit.packed_tensors.base import LayerFormat
from optkit.packed_tensors.microscaled import BLOCKS, Microscaled
from optkit.source.calibration import Calibration
from optkit.stage import Context, Cost, Report
from optkit.stages.quantizing.eight_bits import HESSIAN_COPIES
from optkit.stages.quantizing.fitting import (
    refuse_conv1d,
    refuse_encoder_decoder,
    refuse_layers,
    refuse_other_dtypes,
    refuse_some_experts,
)
from optkit.stages.quantizing.job import BlockOutput, QuantizationJob
from optkit.stages.quantizing.learning import block_learner, with_copies, with_learned_scales, with_learning
from optkit.stages.quantizing.learning_fields import LearningFields
from optkit.stages.quantizing.learning_floats import coded_floats, learned_floats, packed_floats
from optkit.stages.quantizing.rounding_floats import FloatRounding
from optkit.stages.quantizing.shared_text import SharedText
from optkit.stages.quantizing.stacked_experts import pack_stacked, with_stacked
from optkit.stages.quantizing.stacked_gptq import (
    advance_again_,
    compensate_stacked,
    experts_apart,
    refuse_for_stacked,
    round_experts_,
    shape_apart,
)
from optkit.stages.quantizing.streaming import LayerQuantizer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from optkit.algorithms.microscaling import MicroscaledWeight
    from optkit.model.blocks import BlockInputs
    from optkit.stages.quantizing.input_ranges import InputRange
    from optkit.training.fake_quantization import Coded

LESS = less_memory("mx")
WORK_BYTES, AT_ONCE = 28, {"cpu": 1 << 22, "cuda": 1 << 26}
"""What rounding holds for a weight beside weights and codes, and how many weights it rounds at a time."""
FLOAT_BYTES = 24
"""Of a weight that GPTQ rounds, in float32: it, what is left of it, its step, its code, and what is on the way."""


class Mx(LearningFields, SharedText, LayerQuantizer):
    """Store weights as 4-bit floats in small blocks with a scale each (NVFP4 or MXFP4).
    Activations stay as they are, or engines round them to the same floats.
    """

    kind: ClassVar[str] = "mx"
    example: ClassVar[str] = "- bf16\n- mx: {type: nvfp4}"
    for_tasks: ClassVar[frozenset[Task]] = WEIGHTS_ALONE
    version: ClassVar[int] = 9
    # Kernels that fuse layers (q, k and v; gate and up) hold one global scale for them.
    rounds_modules: ClassVar[bool] = True
    efforts: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fast": {},
        "balanced": {"rounding": "gptq"},
        "best": {"rounding": "gptq", "learn": "blocks"},
    }

    type: Literal["nvfp4", "mxfp4"] = "nvfp4"
    """`nvfp4`: blocks of 16 with scales of 8 bits, 4.5 bits a weight. `mxfp4`: blocks of 32 with
    powers of two, 4.25 bits a weight.
    """
    scale_search: Literal["minmax", "mse"] = "mse"
    """`mse`: the scale of each block with the least squared rounding error. `minmax`: the one that
    reaches every weight of it.
    """
    rounding: Literal["nearest", "gptq"] = Field(default="nearest", exclude_if=lambda value: value == "nearest")
    """`nearest`: each weight to the nearest number, without looking at any text. `gptq`: it makes
    up for the errors of those rounded before it, on the calibration text (arXiv:2210.17323);
    `scale_search: mse` weighs each input by its activations."""
    activations: Literal["none", "dynamic"] = Field(default="none", exclude_if=lambda value: value == "none")
    """`dynamic`: engines round the inputs of layers to the same floats, each block with a scale of its
    own; the global scale that nvfp4 needs for them comes from the calibration text. `none`: inputs
    stay as they are."""
    calibration: Calibration | None = Field(default=None, exclude_if=lambda value: value is None)
    """The text for `rounding: gptq`, and for `activations: dynamic` of nvfp4; nothing else needs one."""
    batch_size: BatchSize = Field(default=8, exclude_if=lambda value: value == 8)
    """Sequences of the calibration text that run through a block at once."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        reads = {
            "rounding: gptq": self.rounding == "gptq",
            "activations: dynamic": self._has_global_scale_of_inputs,
            "learn: blocks": bool(self.learn),
        }
        if any(reads.values()) != (self.calibration is not None):
            reader = next((name for name, read in reads.items() if read), "")
            if reader.partition(":")[0] not in self.model_fields_set:
                reader = "effort"
            raise ValueError(
                "the calibration text would not be read: take it out, or set rounding: gptq"
                if self.calibration
                else f"{reader} needs a text: add calibration: {{dataset: c4}}, or take it out"
            )
        if self.type == "mxfp4" and self.scale_steps:
            raise ValueError("scale_steps: those of mxfp4 are powers of two, which no small step changes. Leave it out")
        return self

    @property
    def grid(self) -> Mapping[str, Any]:
        return {"type": self.type, "activations": self.activations, "rounding": self.rounding}

    @property
    def _usual_steps(self) -> Mapping[str, int]:
        return {**super()._usual_steps, "scale_steps": super()._usual_steps["scale_steps"] * (self.type == "nvfp4")}

    @property
    def _has_global_scale_of_inputs(self) -> bool:
        return self.activations == "dynamic" and self.type == "nvfp4"

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Quantize block by block, and stacked experts tensor by tensor.
        Raises what every quantizer raises, and StageError if the model is not in bfloat16.
        """
        checkpoint = Checkpoint(source)
        refuse_other_dtypes(checkpoint.shape, self.kind)
        if (stacked := self._stacked(checkpoint.shape)) and self.calibration:
            return compensate_stacked(source, target, context, stacked, partial(self._stacked_blocks, stacked))
        if stacked:
            return pack_stacked(checkpoint, target, context, stacked, self.scale_search == "mse")
        return super().run(source, target, context)

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return the exact tensors that it leaves; the memory is an estimate."""
        refuse_other_dtypes(shape, self.kind)
        if stacked := self._stacked(shape):
            left, apart = with_stacked(shape, stacked), shape_apart(shape, stacked)
            if self.calibration:
                experts = {name: layer for name, layer in layers_of(apart).items() if EXPERTS in name}
                return self.working_memory(apart, experts, device).cost(shape, left, device), left
            largest = max(info.elements // info.shape[0] for info in stacked.values())
            codes = max(info.elements for info in stacked.values()) * (16 + 1) // 32  # half a byte, and the scales
            work = Work(largest * 4 + _rounding_bytes(largest, device), held=codes, streamed=True, alone=True)
            return work.cost(apart, left, device), left
        return super().predict(shape, device)

    def _stacked(self, shape: ModelShape) -> Mapping[str, TensorInfo]:
        """Return the experts that are packed as gpt-oss' are; no engine opens other layers beside them."""
        stacked = stacked_experts(shape) if self.type == "mxfp4" else {}
        if stacked and (named := self.set_among("include", "exclude", "towers", "activations")):
            raise StageError(
                "the experts are packed, all of them, and nothing else",
                where=f"{self.kind}.{named[0]}",
                why="transformers and vLLM open a model whose experts are stacked so alone",
                remedy="Leave it out",
            )
        if stacked and self.calibration:
            refuse_for_stacked(stacked, self.calibration, self.devices, self.beside_unmodified)
        return stacked

    def _stacked_blocks(self, stacked: Mapping[str, TensorInfo], job: QuantizationJob) -> Iterator[dict[str, Tensor]]:
        """Yield the stacked tensors of block after block, as `quantized_blocks` does layers."""
        from optkit.algorithms.microscaling import quantize_mxfp4
        from optkit.stages.quantizing.hessians import in_turns, watch_inputs
        from optkit.stages.quantizing.input_ranges import tell_few_tokens

        def round_expert(name: str, weight: Tensor, seen: InputRange | None) -> MicroscaledWeight:
            job.task.advance(0, note=name)
            return self._rounding(job).layer(
                name, weight, partial(quantize_mxfp4, search=self.scale_search == "mse"), seen
            )

        inputs = self._read(job)
        for index in job.resume(inputs, LESS, partial(advance_again_, job, inputs, stacked)):
            with job.skeleton.loaded(job.skeleton.blocks[index], job.context.device, LESS):
                with experts_apart(job.skeleton, index, stacked) as layers:
                    turns = in_turns(job.skeleton, layers)
                    seen = ((each, watch_inputs(job.skeleton, index, inputs, each, self._watched)) for each in turns)
                    found = round_experts_(layers, stacked, seen, round_expert)
                if index + 1 < len(job.skeleton.blocks):
                    job.skeleton.advance_(index, inputs)
            yield found
            del found  # before the next block's is made
        tell_few_tokens(job, self.kind)

    def _read(self, job: QuantizationJob) -> BlockInputs:
        """Return the calibration text in front of the first block."""
        from optkit.stages.quantizing.hessians import read_text

        assert self.calibration is not None
        refuse_encoder_decoder(job.skeleton.checkpoint.config, self.kind, self.beside_unmodified)
        tokens = read_text(job.skeleton, self.calibration, job.context, self.kind, job.reading)
        if self.copies:
            tokens = with_copies(job, tokens, self.copies, self.batch_size, LESS)
        job.text, job.calibrated_on = tokens, (self.calibration.identity(),)
        with out_of_memory("in front of the first block", job.context.device, LESS):
            return job.skeleton.capture_inputs(tokens, job.context.device, self.batch_size, job.together)

    def _watched(self, given: Tensor) -> InputRange:
        from optkit.stages.quantizing.input_ranges import InputRange

        return InputRange(given.shape[-1], given.device, hessian=self.rounding == "gptq")

    def layer_format(self, layer: Layer) -> Microscaled:
        return Microscaled(self.type, self.activations == "dynamic")

    def check_layers(self, selection: Selection, formats: Mapping[str, LayerFormat]) -> None:
        layers = tuple(selection.layers.values())
        refuse_conv1d(layers, self.kind, "Use the stage nf4, or gptq with format: gptq")
        refuse_some_experts(selection, formats, self.kind)
        refuse_layers(
            [layer.name for layer in layers if EXPERTS in layer.name and self.type == "nvfp4"],
            "belong to experts",
            where=f"{self.kind}.type",
            why="transformers opens experts in nvfp4 without their global scales, which is wrong",
            remedy="Set type: mxfp4",
        )
        block = BLOCKS[self.type]
        wrong = [layer for layer in layers if layer.inputs % block]
        refuse_layers(
            [layer.name for layer in wrong],
            f"have columns ({wrong[0].inputs if wrong else 0}) that are not a multiple of {block}",
            where=f"{self.kind}.type",
            why=f"Blocks of {self.type} are {block} inputs wide",
            remedy="Exclude them"
            + ("" if any(layer.inputs % BLOCKS["nvfp4"] for layer in layers) else ", or set type: nvfp4"),
        )

    @property
    def needs_no_text(self) -> bool:
        return self.calibration is None

    def quantized_blocks(self, job: QuantizationJob) -> Iterator[BlockOutput]:
        """Yield block after block, each quantized on what those before it make of the text."""
        from optkit.stages.quantizing.hessians import in_turns, watch_inputs
        from optkit.stages.quantizing.input_ranges import tell_few_tokens

        device, skeleton = job.context.device, job.skeleton
        inputs = self._read(job)
        learner = block_learner(job, inputs, self.learning_steps or 0) if self.learn else None
        for index in job.resume(inputs, LESS, partial(job.advance_, inputs, self._opened)):
            with skeleton.loaded(skeleton.blocks[index], device, LESS):
                modules = job.modules(index)
                if learner:
                    learner.enter_(index, inputs, modules)
                layers: dict[str, Mapping[str, Tensor]] = {}
                for turn in in_turns(skeleton, modules):
                    seen = watch_inputs(skeleton, index, inputs, turn, self._watched)
                    for names in grouped(turn, _parent).values():
                        layers |= self._rounding(job).module(names, seen)
                    del seen  # before the block runs again
                if learner:
                    layers |= learned_floats(job, learner, index, inputs, layers, self.activations == "dynamic")
                if job.is_read(index) or (learner and index + 1 < len(skeleton.blocks)):
                    job.advance_(inputs, self._opened, index, BlockOutput(layers))
            yield BlockOutput(layers)
            del layers  # before the next block's is made
        tell_few_tokens(job, self.kind)

    def finished(self, job: QuantizationJob, outputs: Iterable[BlockOutput]) -> Iterable[BlockOutput]:
        if not self.scale_steps:
            return outputs

        def coded(_: str, tensors: Mapping[str, Tensor]) -> Coded:
            return coded_floats(tensors, self.activations == "dynamic", job.context.device)

        return with_learned_scales(job, outputs, self.batch_size, self.scale_steps, coded, packed_floats, LESS)

    def rounded_layers(self, job: QuantizationJob, names: Sequence[str]) -> Mapping[str, Mapping[str, Tensor]]:
        return self._rounding(job).module(names, {})

    def _rounding(self, job: QuantizationJob) -> FloatRounding:
        search, compensates = self.scale_search == "mse", self.rounding == "gptq"
        return FloatRounding(
            job, self.kind, self.type == "nvfp4", search, compensates, self._has_global_scale_of_inputs
        )

    def _opened(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return the layer that a session would build for a quantized one."""
        from optkit.kernels.microscaled import MicroscaledLinear

        packed, scales = tensors["weight_packed"], tensors["weight_scale"]
        bias, weight = (getattr(module, leaf) for leaf in ("bias", "weight"))
        shared, of_inputs = (tensors.get(f"{leaf}_global_scale") for leaf in ("weight", "input"))
        return MicroscaledLinear(packed, scales, shared, bias, weight.dtype, self.activations == "dynamic", of_inputs)

    def working_memory(self, shape: ModelShape, layers: Mapping[str, Layer], device: str) -> Work:
        modules: Counter[str] = Counter()
        for name, layer in layers.items():
            bits = DTYPE_BITS[shape.tensors[f"{name}.weight"].dtype]
            modules[_parent(name)] += layer.outputs * layer.inputs * (bits + 8) // 8
        largest = max(layer.outputs * layer.inputs for layer in layers.values())
        work = max(modules.values()) + _rounding_bytes(largest, device)
        if self.calibration is None:
            return Work(work, streamed=True)
        work += FLOAT_BYTES * largest
        if self.rounding == "gptq":
            work += HESSIAN_COPIES * 4 * max(layer.inputs for layer in layers.values()) ** 2
        refuse_encoder_decoder(shape.config, self.kind, self.beside_unmodified)
        text = self.with_copies(self.calibration)
        sums = hessian_bytes(shape, layers, at_once=text.experts == "all") if self.rounding == "gptq" else 0
        found = calibrated_work(shape, layers, text, self.batch_size, sums, work, self.devices)
        if not self.learn:
            return found
        blocks = sum(layer.outputs * (layer.inputs // BLOCKS[self.type]) for layer in layers.values())
        scales = blocks if self.scale_steps else 0
        return with_learning(found, shape, layers, text, self.batch_size, self.copies or 0, scales, device)


def _rounding_bytes(weights: int, device: str) -> int:
    return WORK_BYTES * min(weights, AT_ONCE[device.partition(":")[0]])


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
