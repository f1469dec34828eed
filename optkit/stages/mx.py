"""Stage `mx`: 4-bit floats in small scaled blocks, MXFP4 or NVFP4."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from optkit.algorithms.few_tokens import FEW_TOKENS
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
from optkit.stages.quantizing.fitting import refuse_conv1d, refuse_layers, refuse_other_dtypes, refuse_some_experts
from optkit.stages.quantizing.job import BlockOutput, QuantizationJob
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

LESS = less_memory("mx")
WORK_BYTES, AT_ONCE = 28, {"cpu": 1 << 22, "cuda": 1 << 26}
"""What rounding holds for a weight beside weights and codes, and how many weights it rounds at a time."""
FLOAT_BYTES = 24
"""Of a weight that GPTQ rounds, in float32: it, what is left of it, its step, its code, and what is on the way."""


class Mx(SharedText, LayerQuantizer):
    """Store weights as 4-bit floats in small blocks with a scale each (NVFP4 or MXFP4).
    Activations stay as they are, or engines round them to the same floats.
    """

    kind: ClassVar[str] = "mx"
    example: ClassVar[str] = "- bf16\n- mx: {type: nvfp4}"
    for_tasks: ClassVar[frozenset[Task]] = WEIGHTS_ALONE
    version: ClassVar[int] = 9
    # Kernels that fuse layers (q, k and v; gate and up) hold one global scale for them.
    rounds_modules: ClassVar[bool] = True

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
        reads = {"rounding: gptq": self.rounding == "gptq", "activations: dynamic": self._has_global_scale_of_inputs}
        if any(reads.values()) != (self.calibration is not None):
            reader = next((name for name, read in reads.items() if read), "")
            raise ValueError(
                "the calibration text would not be read: take it out, or set rounding: gptq"
                if self.calibration
                else f"{reader} needs a text: add calibration: {{dataset: c4}}, or take it out"
            )
        return self

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
            refuse_for_stacked(stacked, self.calibration, self.devices)
        return stacked

    def _stacked_blocks(self, stacked: Mapping[str, TensorInfo], job: QuantizationJob) -> Iterator[dict[str, Tensor]]:
        """Yield the stacked tensors of block after block, as `quantized_blocks` does layers."""
        from optkit.algorithms.microscaling import quantize_mxfp4
        from optkit.stages.quantizing.hessians import in_turns, watch_inputs
        from optkit.stages.quantizing.input_ranges import tell_few_tokens

        def rounded(name: str, weight: Tensor, seen: InputRange | None) -> MicroscaledWeight:
            job.task.advance(0, note=name)
            return self._rounded(job, name, weight, partial(quantize_mxfp4, search=self.scale_search == "mse"), seen)

        inputs = self._read(job)
        for index in job.resume(inputs, LESS, partial(advance_again_, job, inputs, stacked)):
            with job.skeleton.loaded(job.skeleton.blocks[index], job.context.device, LESS):
                with experts_apart(job.skeleton, index, stacked) as layers:
                    turns = in_turns(job.skeleton, layers)
                    seen = ((each, watch_inputs(job.skeleton, index, inputs, each, self._watched)) for each in turns)
                    found = round_experts_(layers, stacked, seen, rounded)
                if index + 1 < len(job.skeleton.blocks):
                    job.skeleton.advance_(index, inputs)
            yield found
        tell_few_tokens(job, self.kind)

    def _read(self, job: QuantizationJob) -> BlockInputs:
        """Return the calibration text in front of the first block."""
        from optkit.stages.quantizing.hessians import read_text

        assert self.calibration is not None
        tokens = read_text(job.skeleton, self.calibration, job.context, self.kind, job.reading)
        job.calibrated_on = (self.calibration.identity(),)
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
        for index in job.resume(inputs, LESS, partial(job.advance_, inputs, self._opened)):
            with skeleton.loaded(skeleton.blocks[index], device, LESS):
                modules = job.modules(index)
                layers: dict[str, Mapping[str, Tensor]] = {}
                for turn in in_turns(skeleton, modules):
                    seen = watch_inputs(skeleton, index, inputs, turn, self._watched)
                    for names in grouped(turn, _parent).values():
                        layers |= self._rounded_module(job, names, seen)
                    del seen  # before the block runs again
                if job.is_read(index):
                    job.advance_(inputs, self._opened, index, BlockOutput(layers))
            yield BlockOutput(layers)
        tell_few_tokens(job, self.kind)

    def rounded_layers(self, job: QuantizationJob, names: Sequence[str]) -> Mapping[str, Mapping[str, Tensor]]:
        return self._rounded_module(job, names, {})

    def _opened(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return the layer that a session would build for a quantized one."""
        from optkit.kernels.microscaled import MicroscaledLinear

        packed, scales = tensors["weight_packed"], tensors["weight_scale"]
        bias, weight = (getattr(module, leaf) for leaf in ("bias", "weight"))
        shared, of_inputs = (tensors.get(f"{leaf}_global_scale") for leaf in ("weight", "input"))
        return MicroscaledLinear(packed, scales, shared, bias, weight.dtype, self.activations == "dynamic", of_inputs)

    def _rounded_module(
        self, job: QuantizationJob, names: Sequence[str], seen: Mapping[str, InputRange]
    ) -> Mapping[str, Mapping[str, Tensor]]:
        from optkit.algorithms.microscaling import (
            exact_nvfp4_scale,
            nvfp4_global_scale,
            pack,
            quantize_mxfp4,
            quantize_nvfp4,
        )

        job.task.advance(0, note=names[0])
        search = self.scale_search == "mse"
        with out_of_memory(names[0], job.context.device, "Use a machine with more memory"):
            weights = {name: job.read(f"{name}.weight").to(job.context.device, non_blocking=True) for name in names}
            quantize = partial(quantize_mxfp4, search=search)
            if self.type == "nvfp4":
                exact = exact_nvfp4_scale(weights.values())
                if exact is not None:
                    job.details["layers_without_error"] = job.details.get("layers_without_error", 0) + len(names)
                shared = nvfp4_global_scale(weights.values()) if exact is None else exact
                quantize = partial(quantize_nvfp4, global_scale=shared, search=search or exact is not None)
            return {
                name: pack(self._rounded(job, name, weight, quantize, seen.get(name)))
                | self._scale_of_inputs(job, name, seen.get(name))
                for name, weight in weights.items()
            }

    def _scale_of_inputs(self, job: QuantizationJob, name: str, seen: InputRange | None) -> dict[str, Tensor]:
        """Return the global scale of a layer's inputs if its format has one."""
        from optkit.algorithms.microscaling import nvfp4_global_scale
        from optkit.stages.quantizing.hessians import refuse_infinite

        if not self._has_global_scale_of_inputs:
            return {}
        if seen is None or not seen.tokens:
            raise StageError(
                "no token of the calibration text reached the layer",
                where=name,
                remedy=f"Exclude it, or set {self.kind}.activations to none",
            )
        refuse_infinite(seen.amax, name, job.skeleton)
        return {"input_global_scale": nvfp4_global_scale([seen.amax])}

    def _rounded(
        self,
        job: QuantizationJob,
        name: str,
        weight: Tensor,
        quantize: Callable[..., MicroscaledWeight],
        seen: InputRange | None,
    ) -> MicroscaledWeight:
        """Return a weight in 4 bits.
        One that saw too few tokens to be compensated on is rounded to nearest, and reported.
        """
        from optkit.algorithms.microscaling import compensated
        from optkit.stages.quantizing.hessians import refuse_infinite

        tokens = seen.tokens if seen else 0
        matrix = seen.hessian() if seen and tokens >= FEW_TOKENS else None
        if matrix is None:
            if self.rounding == "gptq":
                job.details.setdefault("rounded_to_nearest", {})[name] = tokens
            return quantize(weight)
        refuse_infinite(matrix, name, job.skeleton)
        try:
            return compensated(weight.float(), quantize(weight, importance=matrix.diagonal()), matrix)
        except ValueError as error:
            remedy = f"Set {self.kind}.rounding to nearest, or calibrate on more text"
            raise StageError(str(error), where=name, remedy=remedy) from error

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
        text = self.calibration
        sums = hessian_bytes(shape, layers, at_once=text.experts == "all") if self.rounding == "gptq" else 0
        return calibrated_work(shape, layers, text, self.batch_size, sums, work, self.devices)


def _rounding_bytes(weights: int, device: str) -> int:
    return WORK_BYTES * min(weights, AT_ONCE[device.partition(":")[0]])


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
