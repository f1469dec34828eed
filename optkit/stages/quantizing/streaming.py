"""What every quantizing stage does.
It chooses layers, streams the model block by block, and writes the quantized form of each layer.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from optkit.common.field_types import AtLeastOne, Distinct, Name
from optkit.common.grouping import grouped
from optkit.common.out_of_resources import out_of_memory
from optkit.errors import StageError
from optkit.model.calibration_memory import Work
from optkit.model.checkpoint import Checkpoint
from optkit.model.copies import in_main_memory
from optkit.model.kept_blocks import KeptBlocks
from optkit.model.linear_layers import Layer, Selection, layers_of, select
from optkit.model.output_layer import HEAD, outside_of, tied_embedding, with_own_head
from optkit.model.shape import ModelShape, TensorInfo
from optkit.model.together import together
from optkit.model.writer import CheckpointWriter, copy_companions, write_config
from optkit.packed_tensors.base import LayerFormat, apart, packable, quantization_config, read_apart
from optkit.processes.child_program import importing
from optkit.stage import Context, Cost, Format, Report, Transform
from optkit.stages.quantizing.job import BlockOutput, QuantizationJob
from optkit.stages.quantizing.recounting import recount

if TYPE_CHECKING:
    from torch import Tensor


class LayerQuantizer(Transform):
    """Store linear layers of the decoder blocks in a smaller form.

    A quantizer says the form of a layer, what it refuses, the memory it needs, and yields block
    after block; which layers, the plan, and what is written are the same for all of them.
    """

    finds_parts: ClassVar[bool] = True
    produces: ClassVar[Format] = Format.QUANTIZED
    unpacks: ClassVar[bool] = True
    version: ClassVar[int] = 2
    rounds_modules: ClassVar[bool] = False
    """`rounded_layers` needs all layers of a module at once; else it is given one."""

    include: AtLeastOne[Name] = ("*",)
    """Layers to quantize, as glob patterns on full names such as `model.layers.0.mlp.up_proj`.
    Everything outside the decoder blocks (lm_head, embeddings) and routers of experts stay as they
    are."""
    exclude: Distinct[Name] = ()
    """Layers to leave out of those, as glob patterns."""
    towers: Distinct[Literal["text", "vision"]] = Field(default=("text",), exclude_if=lambda value: value == ("text",))
    """`vision` too: the linear layers in the blocks of a vision or audio tower. What stands between
    it and the decoder (projector, merger) stays as it is."""

    @property
    def grid(self) -> Mapping[str, Any]:
        return {"type": self.kind}

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if "text" not in self.towers:
            raise ValueError("towers: text is always among them. Leave its layers out by `include` or `exclude`")
        if "vision" in self.towers and not self.needs_no_text:
            raise ValueError(
                "towers: vision cannot be calibrated, as what is calibrated on runs through the decoder's blocks "
                "alone. Take text alone, or a stage that rounds to nearest: rtn, fp8, mx, nf4, int8"
            )
        return self

    @property
    def needs_no_text(self) -> bool:
        """Whether each layer is rounded by itself, by `rounded_layers` in place of `quantized_blocks`:
        of any model no more is in memory then than a shard and a layer.
        """
        return False

    @abstractmethod
    def layer_format(self, layer: Layer) -> LayerFormat:
        """Return the form that a layer will have on disk."""

    @abstractmethod
    def check_layers(self, selection: Selection, formats: Mapping[str, LayerFormat]) -> None:
        """Refuse, before any computing, layers that do not fit their form, or that nothing opens.

        Raises StageError.
        """

    def deployment_notes(self, selection: Selection, formats: Mapping[str, LayerFormat]) -> list[str]:
        """Return what whoever deploys the model must know of its form, one sentence each."""
        return []

    def _begun_text(self, source: Path, context: Context) -> Future[Any] | None:
        """Begin to read what it is calibrated on, if it is."""
        if not self._text:
            return None
        read = partial(self._text.inputs, source, context.data, context.trust_remote_code)
        return ThreadPoolExecutor(1, "text").submit(read)

    @property
    def _text(self) -> Any:
        """What it is calibrated on; None if that is nothing."""
        return None if self.needs_no_text else getattr(self, "calibration", None)

    def quantized_blocks(self, job: QuantizationJob) -> Iterator[BlockOutput]:
        """Yield what is left of each decoder block, in order. Raises StageError for weights or inputs
        that it cannot round, ResourceError without memory.
        """
        raise NotImplementedError

    def finished(self, job: QuantizationJob, outputs: Iterable[BlockOutput]) -> Iterable[BlockOutput]:
        """Return what is written of the blocks that were yielded, and kept, once all of them are known."""
        return outputs

    def rounded_layers(self, job: QuantizationJob, names: Sequence[str]) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the tensors of layers of a module, each rounded by itself, by their last names; raises so."""
        raise NotImplementedError

    def quantized_head(self, job: QuantizationJob) -> Mapping[str, Tensor]:
        """Return the tensors of the output layer by their last name.
        It is called behind the last block if `lm_head` was selected; raises as `quantized_blocks`.
        """
        raise NotImplementedError

    @abstractmethod
    def working_memory(self, shape: ModelShape, layers: Mapping[str, Layer], device: str) -> Work:
        """Return what the work needs; what waits to be written comes on top."""

    def select_layers(self, layers: Mapping[str, Layer], outside: Mapping[str, Layer]) -> Selection:
        """Return which of a model's layers are quantized; `outside` are those outside its blocks.
        One whose weight the model's own code reads, and would not find, stays as it is.

        Raises StageError for a pattern that matches nothing, and if no layer is left.
        """
        layers, outside = self.with_towers(layers, outside)
        selection = select(layers, tuple(outside), self.include, self.exclude, self.kind)
        selection = packable(selection, self.layer_format, self.kind)
        if "vision" in self.towers and not any(layer.tower for layer in selection.layers.values()):
            reasons = (selection.skipped[name] for name, layer in layers.items() if layer.tower)
            why = next(reasons, "the model has no blocks of vision or audio")
            raise StageError(
                "no layer of a tower is left",
                where=f"{self.kind}.towers",
                why=f"{why[0].upper()}{why[1:]}",
                remedy="Take text alone, or the stage fp8 or int8",
            )
        return selection

    def with_towers(
        self, layers: Mapping[str, Layer], outside: Mapping[str, Layer]
    ) -> tuple[Mapping[str, Layer], Mapping[str, Layer]]:
        """Return the layers with those of the towers that are asked for, and what is left outside."""
        found = {name: layer for name, layer in outside.items() if layer.tower and "vision" in self.towers}
        return {**layers, **found}, {name: layer for name, layer in outside.items() if name not in found}

    def layer_formats(self, selection: Selection) -> dict[str, LayerFormat]:
        """Return the form of each selected layer. Raises StageError as `check_layers` does."""
        formats = {name: self.layer_format(layer) for name, layer in selection.layers.items()}
        self.check_layers(selection, formats)
        return formats

    def written_config(
        self, config: Mapping[str, Any], selection: Selection, formats: Mapping[str, LayerFormat]
    ) -> dict[str, Any]:
        """Return the config.json of the quantized model, of that of its source."""
        told = with_own_head(config) if HEAD in formats else config
        return {**told, "quantization_config": quantization_config(formats, selection.skipped)}

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Quantize block by block, straight from safetensors to safetensors.

        Raises StageError if patterns and format do not fit the model, SourceError for weights
        that are NaN or Inf, ResourceError when memory or disk runs out.
        """
        with importing():
            import_module("torch")
            self.begin(context.device)
            from optkit.model.named_skeleton import open_skeleton
            from optkit.model.skeleton_layers import layers_of_skeleton

            if self._text:  # else this and the thread that reads it might import halves of each other
                import_module("transformers.models.auto.tokenization_auto")
        started = time.monotonic()
        text = self._begun_text(Path(source), context)
        skeleton = open_skeleton(read_apart(source, self.layer_format), context.trust_remote_code)
        if text:
            skeleton.read_first(context.device)
        selection = self.select_layers(*layers_of_skeleton(skeleton))
        formats = self.layer_formats(selection)
        with context.progress.task(self.kind, len(skeleton.blocks), "blocks") as task:
            size = skeleton.checkpoint.shape.size_bytes
            processes = together(getattr(self, "devices", 1))
            kept = KeptBlocks(context.workspace, context.device, context.progress, self.kind, size, processes)
            job = QuantizationJob(skeleton, Path(source), selection, formats, context, task, kept, processes, text)
            if not processes.first:
                return self._followed(job)
            with CheckpointWriter(target, beside=context.device.startswith("cuda")) as writer:
                for name, tensor in in_main_memory(self._written(job)):
                    writer.add(name, tensor)
        copy_companions(source, target, context.trust_remote_code)
        self.write_model_config(job, target)
        job.details |= recount(Checkpoint(target), skeleton.checkpoint, selection, formats)
        job.details["seconds"] = round(time.monotonic() - started, 2)
        return Report(
            changed=len(selection.layers),
            skipped={**selection.skipped, **skeleton.fused},
            details=job.details,
            notes=(*self.deployment_notes(selection, formats), *job.notes),
            calibrated_on=job.calibrated_on,
        )

    def _followed(self, job: QuantizationJob) -> Report:
        """Do this process's share of what the first process writes."""
        for _ in job.kept.each((each.flat() for each in self.quantized_blocks(job)), job.task):
            job.task.advance()
        if job.head:
            self.quantized_head(job)
        return Report(changed=0)

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return the exact tensors that it leaves.
        The memory is an estimate, near what was measured.
        """
        shape = apart(shape, self.layer_format)
        selection = self.select_layers(layers_of(shape), outside_of(shape))
        formats = self.layer_formats(selection)
        tensors: dict[str, TensorInfo] = {}

        def pack(module: str, dtype: str) -> None:
            layer = selection.layers[module]
            stored = formats[module].tensors(dtype, layer.outputs, layer.inputs)
            tensors.update({f"{module}.{leaf}": part for leaf, part in stored.items()})

        for name, info in shape.tensors.items():
            module = name.removesuffix(".weight")
            if module in formats and name.endswith(".weight"):
                pack(module, info.dtype)
            else:
                tensors[name] = info
        if HEAD in formats and f"{HEAD}.weight" not in shape.tensors:
            pack(HEAD, shape.tensors[tied_embedding(shape)].dtype)
        config = self.written_config(shape.config, selection, formats)
        left = ModelShape(config=config, tensors=tensors)
        cost = self.working_memory(shape, selection.layers, device).cost(shape, left, device)
        return cost.noting(self.deployment_notes(selection, formats)), left

    def write_model_config(self, job: QuantizationJob, target: Path) -> None:
        """Write config.json.
        If transformers renames what it reads, or blocks share a layer, it has its names in the model
        too.
        """
        from optkit.model.skeleton_layers import stored_names

        places: dict[str, list[str]] = {}
        for place in stored_names(job.skeleton):
            places.setdefault(job.weight(place).removesuffix(".weight"), []).append(place)
        formats = {
            **job.formats,
            **{place: form for name, form in job.formats.items() for place in places.get(name, ())},
        }
        kept = job.selection.skipped
        skipped = {**kept, **{place: reason for name, reason in kept.items() for place in places.get(name, ())}}
        write_config(
            target,
            self.written_config(job.skeleton.checkpoint.config, Selection(job.selection.layers, skipped), formats),
        )

    def _written(self, job: QuantizationJob) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are left, in the order in which they are written."""
        blocks, made = job.skeleton.blocks, BlockOutput({})
        towers = [name for name, layer in job.selection.layers.items() if layer.tower]
        head = [job.head] if job.head else []
        packed = {f"{name}.weight" for name in (*towers, *head)}
        outside = [name for name in job.skeleton.outside_tensors if name not in packed]
        on_gpu = job.context.device.startswith("cuda")
        if on_gpu and self.needs_no_text:
            inside = (name for block in blocks for name in job.skeleton.block_tensors(block))
            job.read_ahead(outside, (*map(job.weight, towers), *inside, *map(job.weight, head)))
        outputs: Iterable[BlockOutput] = repeat(made, len(blocks))
        if not self.needs_no_text:
            flat = job.kept.each(map(BlockOutput.flat, self.quantized_blocks(job)), job.task)
            outputs = self.finished(job, job.counted(map(BlockOutput.of, flat)))
        yield from self._replaced(job, (f"{name}.weight" for name in towers), towers, made)
        for index, (block, output) in enumerate(zip(blocks, outputs, strict=True)):
            layers = output.layers or job.modules(index)
            yield from self._replaced(job, job.skeleton.block_tensors(block), layers, output)
            job.task.advance(int(self.needs_no_text), note=block.name)
            left = len(blocks) - index
            if index == 0 and on_gpu and not self.needs_no_text:  # what the first block takes was read before
                job.read_ahead(outside, ())
            if index >= len(blocks) // 8 and left % 2:  # what is outside of blocks was read meanwhile
                # a shard of it is written while two blocks are computed, so that none waits for the one before
                number = -(-len(outside) // (left // 2 + 1))
                yield from ((name, job.read(name)) for name in outside[:number])
                del outside[:number]
        if job.head:
            made = made if self.needs_no_text else BlockOutput({HEAD: self.quantized_head(job)})
            yield from self._replaced(job, (f"{HEAD}.weight",), (HEAD,), made)

    def _replaced(
        self, job: QuantizationJob, tensors: Iterable[str], layers: Collection[str], output: BlockOutput
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors, and in place of the weights of layers what was made of them, or is made now."""
        modules = grouped(layers, lambda name: name.rpartition(".")[0] if self.rounds_modules else name)
        together = {name: names for names in modules.values() for name in names}
        rounded, replaced = {**output.layers}, {**output.replaced}
        for name in tensors:
            layer = name.removesuffix(".weight")
            if layer == name or layer not in together:
                yield name, replaced.pop(name) if name in replaced else job.read(name)
                continue
            if layer not in rounded:
                job.task.advance(0, note=layer)
                with out_of_memory(layer, job.context.device, "Use a machine with more memory"):
                    rounded |= self.rounded_layers(job, together[layer])
            yield from ((f"{layer}.{leaf}", tensor) for leaf, tensor in rounded.pop(layer).items())
        yield from replaced.items()
