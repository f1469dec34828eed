"""What the quantizers of 8-bit weights and activations share (`fp8`, `smoothquant`).
They round a layer, calibrate its inputs and refuse alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from optkit.algorithms.few_tokens import FEW_TOKENS
from optkit.common.field_types import BatchSize
from optkit.common.out_of_resources import out_of_memory
from optkit.errors import StageError
from optkit.model.calibration_memory import Work, calibrated_work, code_bytes, hessian_bytes, less_memory
from optkit.model.linear_layers import Layer, Selection, by_block
from optkit.model.shape import DTYPE_BITS, ModelShape, without_indices
from optkit.model.together import ALONE
from optkit.packed_tensors.base import LayerFormat
from optkit.packed_tensors.eight_bit import BLOCK, Activations, EightBitFormat, Number, Scales
from optkit.source.calibration import Calibration
from optkit.stages.quantizing.fitting import joined_differently, refuse_conv1d, refuse_some_experts
from optkit.stages.quantizing.job import BlockOutput, QuantizationJob
from optkit.stages.quantizing.shared_text import SharedText
from optkit.stages.quantizing.streaming import LayerQuantizer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from optkit.algorithms.eight_bit import NumberFormat
    from optkit.model.blocks import BlockInputs
    from optkit.model.prompts import Prompts
    from optkit.stages.quantizing.input_ranges import InputRange

Preparation: TypeAlias = "Callable[[int, Mapping[str, InputRange]], dict[str, Tensor]]"
"""Changes a loaded block before it is rounded, and the ranges of its layers with it: index of the
block, layer -> range of its inputs; returns the tensors of the checkpoint that have another value
now and are not rounded."""
FLOAT_COPIES = {"cpu": 3, "cuda": 4}
"""Float32 copies of a layer's weights that rounding holds at once."""
HESSIAN_COPIES = 3
"""Matrices of the size of its Hessian that GPTQ holds for a layer."""


class EightBitQuantizer(SharedText, LayerQuantizer):
    """Store weights in 8 bits, and say how activations are rounded."""

    number: ClassVar[Number]
    prepares_whole_blocks: ClassVar[bool] = False
    """`preparation` needs the ranges of all layers of a block at once."""

    scale_search: Literal["amax", "mse"] = "mse"
    """`mse`: the scales of weights with the least squared rounding error. `amax`: those that reach
    every weight.
    """
    rounding: Literal["gptq", "nearest"] = "gptq"
    """`gptq`: each weight makes up for the errors of those rounded before it, on the calibration
    text (arXiv:2210.17323). `nearest`: to the nearest number, without looking at any text."""
    batch_size: BatchSize = 8
    """Sequences of the calibration text that run through a block at once."""

    if TYPE_CHECKING:  # fields of the stages, each with its own choices

        @property
        def scales(self) -> Scales: ...

        @property
        def activations(self) -> Activations: ...

        @property
        def calibration(self) -> Calibration | None: ...

    @property
    def sampled_rows(self) -> int:
        """Inputs of each layer to keep, beside their range."""
        return 0

    def layer_format(self, layer: Layer) -> EightBitFormat:
        return EightBitFormat(self.number, self.scales, self.activations)

    def check_layers(self, selection: Selection, formats: Mapping[str, LayerFormat]) -> None:
        refuse_conv1d(selection.layers.values(), self.kind, "Use gptq with format: gptq")
        refuse_some_experts(selection, formats, self.kind)

    def deployment_notes(self, selection: Selection, formats: Mapping[str, LayerFormat]) -> list[str]:
        return joined_differently(selection, formats)

    def _rounded(self, job: QuantizationJob, name: str, weight: Tensor, inputs: InputRange | None) -> dict[str, Tensor]:
        """Return the tensors of a layer, weight float32 [out, in], by their last name.

        A layer that saw too few tokens to be compensated on is rounded to nearest, and reported.
        """
        from optkit.algorithms.eight_bit import amax_scales, quantize, search_scales, tile_of

        tile, numbers = tile_of(self.scales, (weight.shape[0], weight.shape[1])), self._numbers()
        dtype = job.skeleton.stored_dtype(job.weight(name))
        scales = (search_scales if self.scale_search == "mse" else amax_scales)(weight, tile, numbers, dtype)
        hessian = None if inputs is None else inputs.hessian()
        if inputs is None or hessian is None or inputs.tokens < FEW_TOKENS:
            codes = quantize(weight, scales, tile, numbers)
            if hessian is not None:
                job.details.setdefault("rounded_to_nearest", {})[name] = inputs.tokens if inputs else 0
        else:
            codes = self._compensated(job, name, weight, hessian, scales)
        tensors = {"weight": codes, "weight_scale": (scales.view(-1) if self.scales == "tensor" else scales).to(dtype)}
        if inputs is not None and self.activations == "static":
            tensors["input_scale"] = (
                amax_scales(inputs.amax.amax().view(1, 1), (1, 1), numbers, dtype).view(-1).to(dtype)
            )
        return tensors

    def _compensated(self, job: QuantizationJob, name: str, weight: Tensor, hessian: Tensor, scales: Tensor) -> Tensor:
        from optkit.algorithms.eight_bit import tile_of
        from optkit.algorithms.pruning import zeros_of_pruning
        from optkit.algorithms.scaled_gptq import compensated_codes

        tile = tile_of(self.scales, (weight.shape[0], weight.shape[1]))
        rows_apart = self.scales == "channel" and zeros_of_pruning(weight) is None
        shared = job.together if rows_apart else ALONE
        part, form = shared.part(len(weight)), self._numbers()
        try:
            mine = compensated_codes(
                weight[part], hessian, scales[part] if shared.count > 1 else scales, tile, form.round, form.numbers
            )
            return shared.whole(mine, len(weight))
        except ValueError as error:
            raise StageError(
                str(error), where=name, remedy=f"Set {self.kind}.rounding to nearest, or calibrate on more text"
            ) from error

    def _calibrated_blocks(self, job: QuantizationJob, text: Calibration) -> Iterator[BlockOutput]:
        """Quantize block after block.
        Each sees what the quantized blocks before it make of the calibration text.
        """
        from optkit.stages.quantizing.hessians import read_text
        from optkit.stages.quantizing.input_ranges import tell_few_tokens

        device, skeleton = job.context.device, job.skeleton
        less = less_memory(self.kind)
        tokens = read_text(skeleton, text, job.context, self.kind, job.reading)
        job.calibrated_on = (text.identity(),)
        with out_of_memory("in front of the first block", device, less):
            inputs = skeleton.capture_inputs(tokens, device, self.batch_size, job.together)
            prepare = self.preparation(job, tokens)
        for index in job.resume(inputs, less, partial(job.advance_, inputs, self._opened)):
            with skeleton.loaded(skeleton.blocks[index], device, less):
                output = self._calibrated_block(job, index, inputs, prepare)
                if index + 1 < len(skeleton.blocks):
                    job.advance_(inputs, self._opened, index, output)
            yield output
            del output  # before the next block's is made
        tell_few_tokens(job, self.kind)

    def _calibrated_block(
        self, job: QuantizationJob, index: int, inputs: BlockInputs, prepare: Preparation
    ) -> BlockOutput:
        from optkit.model.skeleton_layers import float_weight

        modules, replaced = job.modules(index), dict[str, "Tensor"]()
        layers: dict[str, Mapping[str, Tensor]] = {}
        for ranges in self._ranges(job, index, inputs, modules):
            replaced |= prepare(index, ranges)
            for name, seen in ranges.items():
                job.task.advance(0, note=name)
                layers[name] = self._rounded(job, name, float_weight(modules[name]), seen)
            del ranges, seen  # before the next turn's are made
        return BlockOutput(layers, replaced)

    def preparation(self, job: QuantizationJob, tokens: Tensor | Prompts) -> Preparation:
        """Return what is done to each block before it is rounded.
        tokens: int64 [samples, sequence_length], the calibration text, or prompts with images.
        """
        return lambda index, ranges: {}

    def _ranges(
        self, job: QuantizationJob, index: int, inputs: BlockInputs, modules: Mapping[str, nn.Module]
    ) -> Iterator[dict[str, InputRange]]:
        """Yield the inputs of layers in turns; of experts that saw no token, those of the others, in the last.
        Raises StageError if they are NaN.
        """
        from optkit.stages.quantizing.hessians import in_turns, refuse_infinite, watch_inputs
        from optkit.stages.quantizing.input_ranges import InputRange

        rows = -(-self.sampled_rows // (len(inputs.batches) * job.together.count))
        compensates = self.rounding == "gptq"

        def start(given: Tensor) -> InputRange:
            return InputRange(given.shape[-1], given.device, rows, hessian=compensates)

        whole = self.prepares_whole_blocks or not compensates
        turns = [modules] if whole else in_turns(job.skeleton, modules)
        largest: dict[str, InputRange] = {}
        unseen: list[str] = []
        for turn in turns:
            seen = watch_inputs(job.skeleton, index, inputs, turn, start)
            for name, each in seen.items():
                refuse_infinite(each.amax, name, job.skeleton)
            found = {name: seen[name] for name in turn if name in seen and seen[name].tokens}
            del seen
            unseen += [name for name in turn if name not in found]
            for name, each in found.items():
                alike = largest.get(kind := without_indices(name), each), each
                largest[kind] = max(alike, key=lambda other: float(other.amax.amax()))
            for name in unseen if turn is turns[-1] else ():
                if not (other := largest.get(without_indices(name))):
                    raise StageError(
                        "no token of the calibration text reached the layer",
                        where=name,
                        remedy=f"Raise {self.kind}.calibration.samples, or exclude the layer",
                    )
                job.details.setdefault("calibrated_as_others", []).append(name)
                found[name] = copy(other)
            if found:
                yield found
            del found  # before the next turn's are made

    def _opened(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return the layer that a session would build for a quantized one."""
        from optkit.algorithms.eight_bit import tile_of
        from optkit.kernels.float8_linear import Float8Linear, WidenedLinear
        from optkit.kernels.int8_linear import Int8Linear
        from optkit.model.skeleton_layers import weight_of

        dtype = weight_of(module).dtype
        bias: Tensor | None = module.bias  # type: ignore[assignment]
        codes, scales = tensors["weight"], tensors["weight_scale"]
        if self.scales == "block" or self.activations == "none":
            tile = tile_of(self.scales, (codes.shape[0], codes.shape[1]))
            grid = scales.view(1, 1) if self.scales == "tensor" else scales
            return WidenedLinear(codes, grid, tile, BLOCK if self.activations == "dynamic" else None, bias, dtype)
        kind = Int8Linear if self.number == "int" else Float8Linear
        return kind(codes, scales, tensors.get("input_scale"), bias, dtype)

    def _numbers(self) -> NumberFormat:
        from optkit.algorithms.eight_bit import FLOAT8, INT8

        return FLOAT8 if self.number == "float" else INT8

    def working_memory(self, shape: ModelShape, layers: Mapping[str, Layer], device: str) -> Work:
        largest = max(layer.outputs * layer.inputs for layer in layers.values())
        work = FLOAT_COPIES[device.partition(":")[0]] * largest * DTYPE_BITS["F32"] // 8
        if self.calibration is None:
            return Work(work, streamed=True)
        work += code_bytes(shape, layers)
        compensating = hessians = matrix = 0
        text, at_once = self.calibration, self.prepares_whole_blocks or self.calibration.experts == "all"
        if self.rounding == "gptq":
            matrix = 4 * max(layer.inputs for layer in layers.values()) ** 2
            compensating = HESSIAN_COPIES * matrix
            hessians = hessian_bytes(shape, layers, at_once)
        kept, prepared = self.preparation_bytes(by_block(shape, layers), layers, compensating + matrix)
        sums, most = hessians + kept, max(work + compensating, prepared)
        return calibrated_work(shape, layers, text, self.batch_size, sums, most, self.devices)

    def preparation_bytes(
        self, blocks: Sequence[Sequence[str]], layers: Mapping[str, Layer], compensating: int
    ) -> tuple[int, int]:
        """Return the bytes that `preparation` keeps of a block and those that it works with.
        `compensating`: GPTQ's for a Hessian.
        """
        return 0, 0
