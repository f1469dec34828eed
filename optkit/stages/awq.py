"""Stage `awq`: scale inputs so that weights that matter most are rounded most finely."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import model_validator

from optkit.common.out_of_resources import out_of_memory
from optkit.model.calibration_memory import Work, less_memory
from optkit.model.linear_layers import Layer, Selection
from optkit.model.output_layer import HEAD
from optkit.model.shape import ModelShape
from optkit.packed_tensors.awq import AWQ, AwqPacked, refuse_unfit_for_awq
from optkit.packed_tensors.base import LayerFormat
from optkit.packed_tensors.integers import PackedFormat, PackQuantized
from optkit.stages.quantizing.backend_field import Backed
from optkit.stages.quantizing.fitting import refuse_conv1d, refuse_some_experts, refuse_uneven_groups, refuse_unfit
from optkit.stages.quantizing.input_scaling import BlockScaler, InputScaling, ScaledBlock
from optkit.stages.quantizing.integers import packed_grid, put_back_
from optkit.stages.quantizing.job import BlockOutput, QuantizationJob
from optkit.stages.quantizing.overrides import Override

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.algorithms.grid import Grid, QuantizedWeight

LESS_MEMORY = less_memory("awq")


class Awq(InputScaling, Backed):
    """Scale weights that meet large activations up, so that rounding hurts them less (AWQ).
    Then round to nearest (arXiv:2306.00978).

    The scales are folded into the norm or linear layer that makes the input, so the model has no new
    layer; running each block finds it. They are searched with the second moments of the inputs,
    which are gathered once a block. At most one block is in memory.
    """

    version: ClassVar[int] = 5
    kind: ClassVar[str] = "awq"
    example: ClassVar[str] = "- awq: {format: awq, group_size: 64, calibration: {dataset: c4}}"

    symmetric: bool = False
    """Without zero points, which the fastest kernels ask for. false: one zero point per group, a
    little better and a little larger.
    """
    format: Literal["compressed-tensors", "awq"] = "compressed-tensors"  # type: ignore[assignment]
    """`compressed-tensors` (pack-quantized) or `awq` (the GEMM layout of AutoAWQ: 4 bits,
    asymmetric, one form for all layers; experts in it are opened by vLLM on GPUs alone)."""
    scale_search: Literal["hessian", "mse", "minmax"] = "hessian"
    """`hessian`: the scale of each group with the least rounding error, each input weighted by its
    activations, which cuts outliers. `mse`: unweighted. `minmax`: the scale that reaches every
    weight."""

    backend: Literal["optkit", "autoawq", "auto_round", "gptqmodel", "llmcompressor"] = "optkit"
    """Who does the work: optkit, or another library in an environment of its own (`optkit env`),
    with the same tokens.
    """

    @model_validator(mode="after")
    def _fits_awq(self) -> Self:
        if self.packing != AWQ:
            return self
        changes = [each for each in self.overrides.values() if isinstance(each, Override)]
        if self.bits != 4 or self.symmetric or any(each.bits or each.symmetric for each in changes):
            raise ValueError(
                "the format awq holds 4 bits with zero points: set bits: 4 and symmetric: false, "
                "or format: compressed-tensors"
            )
        if self.lm_head:
            raise ValueError("the format awq keeps lm_head as it is: set lm_head: false, or format: compressed-tensors")
        return self

    def layer_format(self, layer: Layer) -> PackedFormat:
        form = super().layer_format(layer)
        return AwqPacked(form.group_size) if self.packing == AWQ and isinstance(form, PackQuantized) else form

    def check_layers(self, selection: Selection, formats: Mapping[str, LayerFormat]) -> None:
        layers = tuple(selection.layers.values())
        refuse_conv1d(
            layers,
            self.kind,
            "Put `- awq_scale` in front of `- gptq: {format: gptq}`",
            "compressed-tensors and awq hold Linear layers only",
        )
        if self.packing == AWQ:
            refuse_unfit_for_awq(layers, formats, self.kind)
            refuse_uneven_groups(layers, next(iter(formats.values())).group_size, self.kind)  # type: ignore[attr-defined]
            refuse_some_experts(selection, formats, self.kind)
        else:
            refuse_unfit(selection, formats, self.kind)

    def quantized_blocks(self, job: QuantizationJob) -> Iterator[BlockOutput]:
        from optkit.stages.quantizing.hessians import details_of_sums, read_text

        device, skeleton = job.context.device, job.skeleton
        tokens = read_text(skeleton, self.calibration, job.context, self.kind, job.reading)
        job.calibrated_on = (self.calibration.identity(),)
        job.details |= {"losses": {}, "gains": {}, "unscaled": {}, "rounded_without_inputs": []}
        job.details |= details_of_sums(device, skeleton.dtype, self.equal_tokens)
        with out_of_memory("in front of the first block", device, LESS_MEMORY):
            scaler = BlockScaler(skeleton, tokens, device, self, job.together)

        def advance_again_(index: int, output: BlockOutput) -> None:
            put_back_(job, index, output)
            skeleton.advance_(index, scaler.inputs)

        for index in job.resume(scaler.inputs, LESS_MEMORY, advance_again_):
            yield self._block(job, index, scaler)
        job.inputs = scaler.inputs
        if few := job.details["rounded_without_inputs"]:
            job.context.progress.warn(
                f"{len(few):,} layers are rounded without regard to their inputs: they saw too few calibration tokens"
                f" ({few[0]}); raise awq.calibration.samples"
            )

    def _block(self, job: QuantizationJob, index: int, scaler: BlockScaler) -> BlockOutput:
        """Scale and round a block; nothing of it is in memory when it returns but what is written."""
        device, skeleton, block = job.context.device, job.skeleton, job.skeleton.blocks[index]
        with skeleton.loaded(block, device, LESS_MEMORY):
            grids = {name: packed_grid(job, name) for name in job.modules(index)}
            calibrated = {name: grid for name, grid in grids.items() if not self._rounds_to_nearest(name)}
            scaled = scaler.scale_(index, calibrated, "nearest", self.kind)
            quantized = self._quantize_block(job, index, grids, scaled)
            if job.is_read(index):
                skeleton.advance_(index, scaler.inputs)
        job.details["gains"] |= scaled.gains
        job.details["unscaled"] |= scaled.refused
        replaced = {
            name: tensor for name, tensor in scaled.changed.items() if name.removesuffix(".weight") not in quantized
        }
        return BlockOutput(self._packed(job, quantized), replaced)

    def _quantize_block(
        self, job: QuantizationJob, index: int, grids: Mapping[str, Grid], scaled: ScaledBlock
    ) -> dict[str, QuantizedWeight]:
        """Round the layers of a block, and put the rounded weights into the modules."""
        from optkit.algorithms.gptq import relative, row_errors
        from optkit.model.skeleton_layers import float_weight, put_weight_
        from optkit.stages.quantizing.compensation import all_rows

        quantized = {}
        for name, module in job.modules(index).items():
            job.task.advance(0, note=name)
            weight, hessian = float_weight(module), scaled.hessians.get(name)
            rows = weight[job.together.part(len(weight))]
            part = self._round(name, rows, grids[name], None if hessian is None else hessian.diagonal())
            errors = None if hessian is None else row_errors(rows, part.dequantize(), hessian)
            quantized[name], errors = all_rows(part, errors, partial(job.together.whole, length=len(weight)))
            if errors is not None:
                job.details["losses"][name] = relative(errors)
            elif not self._rounds_to_nearest(name):
                job.details["rounded_without_inputs"].append(name)
            put_weight_(module, quantized[name].dequantize())
        return quantized

    def quantized_head(self, job: QuantizationJob) -> Mapping[str, Tensor]:
        """Round the output layer, each input weighted by its activations.
        What makes its input takes no scales.
        """
        from optkit.stages.quantizing.hessians import head_hessian

        device = job.context.device
        with out_of_memory(HEAD, device, LESS_MEMORY):
            hessian = None if self._rounds_to_nearest(HEAD) else head_hessian(job, self.equal_tokens)
            weight = job.skeleton.checkpoint.read_finite(job.weight(HEAD)).to(device).float()
            importance = hessian.matrix().diagonal() if hessian and hessian.tokens else None
            return self._packed(job, {HEAD: self._round(HEAD, weight, packed_grid(job, HEAD), importance)})[HEAD]

    def _round(self, name: str, weight: Tensor, grid: Grid, importance: Tensor | None) -> QuantizedWeight:
        from optkit.algorithms.grid import minmax_scales, round_to_nearest
        from optkit.algorithms.scale_search import search_scales

        if self.scale_search == "minmax" or self._rounds_to_nearest(name):
            return round_to_nearest(weight, *minmax_scales(weight, grid), grid)
        counted = importance if self.scale_search == "hessian" else None
        return round_to_nearest(weight, *search_scales(weight, grid, counted, compiled=True), grid)

    def working_memory(self, shape: ModelShape, layers: Mapping[str, Layer], device: str) -> Work:
        return self.working_bytes(shape, layers, "nearest", device)
