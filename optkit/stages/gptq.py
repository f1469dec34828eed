"""Stage `gptq`: quantize block by block so that outputs on calibration text stay as they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from optkit.common.grouping import grouped
from optkit.common.out_of_resources import out_of_memory
from optkit.kernels.cpu.families import why_not_config
from optkit.model.calibration_memory import (
    Work,
    calibrated_work,
    code_bytes,
    hessian_bytes,
    less_memory,
    summed_bytes,
    waiting_bytes,
)
from optkit.model.linear_layers import Layer, by_block
from optkit.model.linear_layers import stacks as sharing_input
from optkit.model.output_layer import HEAD
from optkit.model.shape import ModelShape, without_indices
from optkit.model.task import GENERATING, Task
from optkit.packed_tensors.integers import PackedFormat, PackQuantized
from optkit.source.calibration import Calibration
from optkit.stages.quantizing.backend_field import Backed
from optkit.stages.quantizing.fitting import refuse_encoder_decoder
from optkit.stages.quantizing.gptq_fields import GptqFields
from optkit.stages.quantizing.integers import packed_format, put_back_
from optkit.stages.quantizing.job import BlockOutput, QuantizationJob
from optkit.stages.quantizing.learning import (
    block_learner,
    coded_integers,
    learned_block,
    unpacked,
    with_copies,
    with_learned_scales,
    with_learning,
    with_unmodified,
)
from optkit.stages.quantizing.learning_fields import LearningFields
from optkit.stages.quantizing.pruned_zeros import held_zeros, tell_zeros
from optkit.stages.quantizing.shared_text import SharedText
from optkit.stages.quantizing.stacks import EXPERTS_AT_ONCE, HEAD_ROWS, work_bytes
from optkit.stages.quantizing.warming import warming

if TYPE_CHECKING:
    from torch import Tensor, nn

    from optkit.algorithms.grid import QuantizedWeight
    from optkit.algorithms.hessian import Hessian
    from optkit.model.blocks import BlockInputs
    from optkit.stages.quantizing.compensation import Compensation
    from optkit.stages.quantizing.earlier_errors import EarlierErrors
    from optkit.training.fake_quantization import Coded

LESS_MEMORY = less_memory("gptq")


class Gptq(LearningFields, GptqFields, SharedText, Backed):
    """Quantize layer by layer so that outputs on a calibration text change least (GPTQ).
    After GPTQ (arXiv:2210.17323), block by block.

    At most one decoder block and the hidden states of the calibration text are in memory. Scales
    are static, so `activation_order` costs nothing when the model runs.
    """

    kind: ClassVar[str] = "gptq"
    example: ClassVar[str] = "- gptq: {bits: 4, group_size: 32, symmetric: false, calibration: {dataset: c4}}"
    version: ClassVar[int] = 15
    for_tasks: ClassVar[frozenset[Task]] = GENERATING
    efforts: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fast": {},
        "balanced": {"earlier_errors": 0.5},
        "best": {"learn": "blocks"},
    }

    calibration: Calibration = Calibration(dataset="c4")
    """The text whose hidden states decide which errors matter."""
    backend: Literal["optkit", "auto_round", "gptqmodel", "llmcompressor"] = "optkit"
    """Who does the work: optkit, or another library in an environment of its own (`optkit env`),
    with the same tokens.
    """
    earlier_errors: float = Field(default=0.0, ge=0, le=1, exclude_if=lambda value: not value)
    """Share of the errors made before it that each layer makes up for, the unmodified model's outputs
    being its target (GPTAQ, arXiv:2504.02692). Layers are then rounded one after another, which takes up
    to twice the time on a GPU and up to three times on a CPU. 0.5 serves best; 1 follows what is noise.
    """

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.earlier_errors and self.true_sequential is False and not self._offer:
            raise ValueError(
                "earlier_errors, which effort: balanced picks, rounds layers one after another, so "
                "true_sequential: false would not be read. Leave it out"
            )
        return self

    @property
    def grid(self) -> Mapping[str, Any]:
        return {**super().grid, "rounding": "gptq"}

    @property
    def beside_unmodified(self) -> str:
        return super().beside_unmodified or ("earlier_errors" if self.earlier_errors else "")

    def layer_format(self, layer: Layer) -> PackedFormat:
        form = super().layer_format(layer)
        return replace(form, activation_order=self.activation_order) if isinstance(form, PackQuantized) else form

    def begin(self, device: str) -> None:
        warming(device)

    def quantized_blocks(self, job: QuantizationJob) -> Iterator[BlockOutput]:
        if self.scale_steps:
            return map(unpacked, self.quantized_weights(job))
        return super().quantized_blocks(job)

    def finished(self, job: QuantizationJob, outputs: Iterable[BlockOutput]) -> Iterable[BlockOutput]:
        if not self.scale_steps:
            return outputs

        from optkit.algorithms.grid import QuantizedWeight

        def coded(name: str, tensors: Mapping[str, Tensor]) -> Coded:
            return coded_integers(job, name, QuantizedWeight(**tensors, bits=packed_format(job, name).bits))

        def packed(name: str, learned: Coded) -> Mapping[str, Tensor]:
            return self._packed(job, {name: learned.weight})[name]

        fixed, size, steps = self._rounds_to_nearest, self.batch_size, self.scale_steps
        return with_learned_scales(job, outputs, size, steps, coded, packed, LESS_MEMORY, fixed)

    def quantized_weights(self, job: QuantizationJob) -> Iterator[Mapping[str, QuantizedWeight]]:
        yield from self.calibrated_weights(job)
        tell_zeros(job)

    def calibrated_weights(self, job: QuantizationJob) -> Iterator[Mapping[str, QuantizedWeight]]:
        """Yield each block's quantized layers, and count the zeros of pruned ones in the details."""
        from optkit.stages.quantizing.calibration_products import is_prompt, sequences_at_once
        from optkit.stages.quantizing.hessians import details_of_sums, read_text, tokens_of_experts
        from optkit.stages.quantizing.input_ranges import tell_few_tokens
        from optkit.stages.quantizing.one_pass import one_pass

        device, skeleton = job.context.device, job.skeleton
        refuse_encoder_decoder(skeleton.checkpoint.config, self.kind, self.beside_unmodified)
        tokens = read_text(skeleton, self.calibration, job.context, self.kind, job.reading)
        if self.copies:
            tokens = with_copies(job, tokens, self.copies, self.batch_size, LESS_MEMORY)
        job.text = tokens
        job.calibrated_on = (self.calibration.identity(),)
        job.details |= {"losses": {}, "rounded_to_nearest": {}, "raised_damping": {}, "expert_tokens": {}}
        job.details |= details_of_sums(device, skeleton.dtype, self.equal_tokens and not self.earlier_errors)
        with out_of_memory("in front of the first block", device, LESS_MEMORY):
            fewer = sequences_at_once(self.batch_size, self.calibration.size[1], device)
            inputs = skeleton.capture_inputs(tokens, device, self.batch_size if self.learn else fewer, job.together)
        warming(device).join()
        learner = block_learner(job, inputs, self.learning_steps or 0) if self.learn else None
        compensation, earlier = self._compensation(job), self._earlier(job, inputs)
        once = self._in_one_pass and all(is_prompt(skeleton, index, inputs) for index in range(len(skeleton.blocks)))
        if once and self.true_sequential == "auto":
            job.details["true_sequential"] = True

        def advance_again_(index: int, output: BlockOutput) -> None:
            self._advance_(job, inputs, index, put_back_(job, index, output))

        for index in job.resume(inputs, LESS_MEMORY, advance_again_):
            with skeleton.loaded(skeleton.blocks[index], device, LESS_MEMORY):
                modules = job.modules(index)
                if learner:
                    learner.enter_(index, inputs, modules)
                if earlier:
                    earlier.enter_(index, inputs, modules)
                quantized: dict[str, QuantizedWeight] = {}
                if once:
                    advance = job.is_read(index)
                    turns = one_pass(skeleton, index, inputs, modules, quantized, self.equal_tokens, advance)
                else:
                    turns = self._turns(job, index, inputs, modules, earlier)
                for layers, hessians in turns:
                    job.details["expert_tokens"] |= tokens_of_experts(layers, hessians)
                    quantized |= compensation.round_(layers, hessians)
                    del hessians  # before the next turn's are made
                if learner:
                    stay = {name for name in quantized if self._rounds_to_nearest(name)}
                    stay |= set(job.details["rounded_to_nearest"])
                    starts = {name: coded_integers(job, name, weight) for name, weight in quantized.items()}
                    quantized |= learned_block(job, learner, index, inputs, starts, stay, self.keep_zeros)
                    del starts
                if (not once and job.is_read(index)) or (learner and index + 1 < len(skeleton.blocks)):
                    if earlier:
                        earlier.leave_(index, inputs)
                    self._advance_(job, inputs, index, quantized)
            yield quantized
            del quantized  # before the next block's is made
        job.inputs = inputs
        if not job.details["expert_tokens"]:
            del job.details["expert_tokens"]
        tell_few_tokens(job, self.kind)

    def _advance_(
        self, job: QuantizationJob, inputs: BlockInputs, index: int, quantized: Mapping[str, QuantizedWeight]
    ) -> None:
        from optkit.stages.quantizing.calibration_products import in_codes, in_cpp

        with in_codes(job.modules(index), quantized), in_cpp(job.skeleton, index, inputs):
            job.skeleton.advance_(index, inputs)

    @property
    def _in_one_pass(self) -> bool:
        """Whether a block may run through the text once; `is_prompt` says if it can."""
        return self.true_sequential is not False and not self.learn and not self.earlier_errors

    def _turns(
        self,
        job: QuantizationJob,
        index: int,
        inputs: BlockInputs,
        modules: Mapping[str, nn.Module],
        earlier: EarlierErrors | None,
    ) -> Iterator[tuple[dict[str, nn.Module], dict[str, Hessian]]]:
        """Yield layers of a loaded block that are rounded together, and their Hessians."""
        from optkit.stages.quantizing.hessians import collect_hessians, in_turns, turns_of

        skeleton, turns = job.skeleton, [list(modules)]
        if self.true_sequential is True:
            turns = turns_of(skeleton, index, inputs, modules)
        elif earlier:
            turns = earlier.turns(index, inputs, modules)
        for layers in (part for turn in turns for part in in_turns(skeleton, {name: modules[name] for name in turn})):
            if earlier:
                yield layers, earlier.move_(index, inputs, layers)
            else:
                yield layers, collect_hessians(skeleton, index, inputs, layers, self.equal_tokens)

    def _earlier(self, job: QuantizationJob, inputs: BlockInputs) -> EarlierErrors | None:
        if not self.earlier_errors:
            return None
        from optkit.stages.quantizing.earlier_errors import EarlierErrors

        fields = self.damping, self.equal_tokens, self.keep_zeros
        return EarlierErrors(job.skeleton, inputs, self.earlier_errors, *fields, self._rounds_to_nearest)

    def _compensation(self, job: QuantizationJob) -> Compensation:
        from optkit.stages.quantizing.compensation import Compensation

        return Compensation(job, self, self._rounds_to_nearest, counts_zeros=not self.learn)

    def quantized_head(self, job: QuantizationJob) -> Mapping[str, Tensor]:
        """Quantize the output layer, some rows at a time.
        Its Hessian is small, and it has a row for each token.
        """
        from optkit.algorithms.grid import joined
        from optkit.stages.quantizing.hessians import head_hessian

        device = job.context.device
        with out_of_memory(HEAD, device, LESS_MEMORY):
            hessian = None if self._rounds_to_nearest(HEAD) else head_hessian(job, self.equal_tokens)
            weight = job.skeleton.checkpoint.read_finite(job.weight(HEAD))
            rows = [each.to(device).float() for each in weight.split(HEAD_ROWS)]
            held = [held_zeros([each], self.keep_zeros) for each in rows]
            compensation = self._compensation(job)
            found = [
                compensation.rounded([HEAD], each[None], [hessian], [zeros])[0]
                for each, zeros in zip(rows, held, strict=True)
            ]
            compensation.tell_damping(HEAD, max(damping for _, _, damping in found))
            return self._packed(job, {HEAD: joined([part for part, _, _ in found])})[HEAD]

    def working_memory(self, shape: ModelShape, layers: Mapping[str, Layer], device: str) -> Work:
        refuse_encoder_decoder(shape.config, self.kind, self.beside_unmodified)
        kind = device.partition(":")[0]
        room = EXPERTS_AT_ONCE["cuda" if self.calibration.experts == "all" else kind]
        once = self._in_one_pass and device == "cpu" and _is_known(shape)  # then each layer's Hessian is there alone
        work = code_bytes(shape, layers) + max(
            work_bytes([layers[name] for name in same[0]], len(same), kind, room)
            + 4 * once * layers[same[0][0]].inputs ** 2
            for block in by_block(shape, layers)
            for same in grouped(sharing_input(block), lambda stack: tuple(map(without_indices, stack))).values()
        )
        text = self.with_copies(self.calibration)
        if once:
            sums = waiting_bytes(shape, layers, text) // self.devices
        else:
            sums = hessian_bytes(shape, layers, at_once=text.experts == "all")
        found = calibrated_work(
            shape, layers, text, self.batch_size, sums, work, self.devices, summed_bytes(shape, device)
        )
        if self.earlier_errors:
            found = with_unmodified(found, shape, layers, text, self.batch_size)
        if not self.learn:
            return found
        sizes = [(layer, getattr(self.layer_format(layer), "group_size", None)) for layer in layers.values()]
        counts = (layer.outputs * (layer.inputs // (size or layer.inputs)) for layer, size in sizes)
        scales = sum(counts) if self.scale_steps else 0
        return with_learning(found, shape, layers, text, self.batch_size, self.copies or 0, scales, device)


def _is_known(shape: ModelShape) -> bool:
    """Whether `one_pass` knows a model's blocks, by its shape."""
    dtypes = {info.dtype for info in shape.tensors.values()}
    return dtypes == {"F32"} and why_not_config(shape.config) is None
