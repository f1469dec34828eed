"""What `rtn` and `gptq` share: their fields, which layers they take, and writing a packed model block by block."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from optkit.errors import ResourceError
from optkit.model.checkpoint import Checkpoint
from optkit.model.memory import is_out_of_memory
from optkit.model.routers import is_router
from optkit.model.shape import ModelShape, TensorInfo
from optkit.model.writer import SHARD_BYTES, CheckpointWriter, copy_companions, write_config
from optkit.progress import Task
from optkit.stage import Context, Cost, Format, Report, Transform
from optkit.stages.fitting import refuse_own_code, refuse_unfit
from optkit.stages.packed_format import GPTQ, GPTQ_GROUP_SIZES, PackedFormat, Packing
from optkit.stages.selection import Layer, Selection, layers_of, select

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from optkit.algorithms.grid import Grid, QuantizedWeight
    from optkit.model.skeleton import Skeleton


@dataclass
class Job:
    """One run of a quantizer: what it works on, and what it finds on the way."""

    skeleton: Skeleton
    source: Path
    selection: Selection
    context: Context
    task: Task
    """The bar, one step per block."""
    details: dict[str, Any] = field(default_factory=dict)
    """Goes into the report."""
    calibrated_on: tuple[Mapping[str, str], ...] = ()

    def modules(self, index: int) -> dict[str, nn.Module]:
        """Return the layers to quantize of a block."""
        linears = self.skeleton.linears(self.skeleton.blocks[index])
        return {name: module for name, module in linears.items() if name in self.selection.layers}


class WeightQuantizer(Transform):
    """Round the weights of linear layers to a few bits each and store them packed."""

    produces: ClassVar[Format] = Format.QUANTIZED

    bits: Literal[2, 3, 4, 8] = 4
    """Bits of a weight."""
    group_size: int | None = Field(default=64, ge=8)
    """Inputs that share a scale; it must divide the inputs of every layer. null (or -1): one scale per output channel."""
    symmetric: bool = True
    """Without zero points, which the fastest kernels ask for. false: one zero point per group, a little better and a little larger."""
    format: PackedFormat = "compressed-tensors"
    """`compressed-tensors` (pack-quantized) or `gptq` (of AutoGPTQ and gptqmodel, symmetric; the one for GPT-2's Conv1D layers)."""
    include: tuple[str, ...] = Field(default=("*",), min_length=1)
    """Layers to quantize, as glob patterns on full names such as `model.layers.0.mlp.up_proj`. Everything outside the decoder blocks
    (lm_head, embeddings) and routers of experts stay as they are."""
    exclude: tuple[str, ...] = ()
    """Layers to leave out of those, as glob patterns."""

    @field_validator("group_size", mode="before")
    @classmethod
    def _per_channel(cls, value: Any) -> Any:
        return None if value == -1 else value

    @model_validator(mode="after")
    def _openable(self) -> Self:
        if self.format == GPTQ and not self.symmetric:
            raise ValueError(
                "gptqmodel and vLLM open zero points in this format only from gptqmodel: set symmetric: true, or format: compressed-tensors"
            )
        if self.format == GPTQ and self.group_size not in (None, *GPTQ_GROUP_SIZES):
            sizes = ", ".join(str(size) for size in GPTQ_GROUP_SIZES)
            raise ValueError(
                f"gptqmodel opens group sizes {sizes} and null, not {self.group_size}: take one, or format: compressed-tensors"
            )
        return self

    @property
    def packing(self) -> Packing:
        """How the weights are packed."""
        return Packing(self.format, self.bits, self.group_size, self.symmetric)

    @property
    def _kind(self) -> str:
        return type(self).__name__.lower()

    def _quantized_blocks(self, job: Job) -> Iterator[Mapping[str, QuantizedWeight]]:
        """Yield the quantized layers of each block, by name."""
        raise NotImplementedError

    def _memory(self, shape: ModelShape, layers: Mapping[str, Layer], device: str) -> tuple[int, int]:
        """Return the bytes of RAM and of GPU memory that the work needs, besides what waits to be written."""
        raise NotImplementedError

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Quantize block by block, straight from safetensors to safetensors.

        Raises StageError where patterns, group size and format do not fit the model, SourceError for weights that are NaN or Inf,
        ResourceError when memory or disk runs out.
        """
        from optkit.model.skeleton import Skeleton

        started = time.monotonic()
        checkpoint = Checkpoint(source)
        refuse_own_code(checkpoint.config, self._kind)
        skeleton = Skeleton(checkpoint)
        selection = self._selection(skeleton)
        with context.progress.task(self._kind, len(skeleton.blocks), "blocks") as task:
            job = Job(skeleton, Path(source), selection, context, task)
            self._write(job, target)
        copy_companions(source, target)
        config = self.packing.quantization_config(selection.skipped)
        write_config(target, {**skeleton.checkpoint.config, "quantization_config": config})
        if self.format == GPTQ:
            (target / "quantize_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        job.details |= _recount(Checkpoint(target), skeleton.checkpoint, job.selection)
        job.details["seconds"] = round(time.monotonic() - started, 2)
        return Report(
            changed=len(selection.layers),
            skipped={**selection.skipped, **skeleton.fused},
            details=job.details,
            calibrated_on=job.calibrated_on,
        )

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return the exact tensors that it leaves; the memory is an estimate, near what was measured."""
        refuse_own_code(shape.config, self._kind)
        layers = layers_of(shape)
        outside = ["lm_head"] if "lm_head.weight" in shape.tensors or shape.config.get("tie_word_embeddings") else []
        selection = select(layers, outside, self.include, self.exclude, self._kind)
        refuse_unfit(selection, self.packing, self._kind)
        tensors: dict[str, TensorInfo] = {}
        for name, info in shape.tensors.items():
            module = name.removesuffix(".weight")
            if module in selection.layers and name.endswith(".weight"):
                layer = selection.layers[module]
                packed = self.packing.tensors(info.dtype, layer.outputs, layer.inputs)
                tensors |= {f"{module}.{leaf}": part for leaf, part in packed.items()}
            else:
                tensors[name] = info
        config = {**shape.config, "quantization_config": self.packing.quantization_config(selection.skipped)}
        left = ModelShape(config=config, tensors=tensors)
        ram, gpu = self._memory(shape, selection.layers, device)
        return Cost(disk_bytes=left.size_bytes, ram_bytes=ram + min(left.size_bytes, SHARD_BYTES), gpu_bytes=gpu), left

    def _selection(self, skeleton: Skeleton) -> Selection:
        from torch import nn
        from transformers.pytorch_utils import Conv1D

        layers, blocks = {}, []
        for block in skeleton.blocks:
            blocks.append(f"{block.name}.")
            for name, module in skeleton.linears(block).items():
                transposed = isinstance(module, Conv1D)
                outputs, inputs = reversed(module.weight.shape) if transposed else module.weight.shape
                layers[name] = Layer(name, outputs, inputs, transposed)
        layers |= {name: layer for name, layer in layers_of(skeleton.checkpoint.shape).items() if is_router(name)}
        outside = [
            name for name, module in skeleton.model.named_modules() if isinstance(module, nn.Linear) and not name.startswith(tuple(blocks))
        ]
        selection = select(layers, outside, self.include, self.exclude, self._kind)
        refuse_unfit(selection, self.packing, self._kind)
        return selection

    def _write(self, job: Job, target: Path) -> None:
        checkpoint, blocks = job.skeleton.checkpoint, job.skeleton.blocks
        with CheckpointWriter(target) as writer:
            for name in job.skeleton.outside_tensors:
                writer.add(name, checkpoint.read_finite(name))
            for block, quantized in zip(blocks, self._quantized_blocks(job), strict=True):
                for name in job.skeleton.block_tensors(block):
                    module = name.removesuffix(".weight")
                    if module in quantized and name.endswith(".weight"):
                        scale_dtype = self._grid(job.skeleton, module).scale_dtype
                        for leaf, tensor in self._packed(quantized[module], scale_dtype).items():
                            writer.add(f"{module}.{leaf}", tensor)
                    else:
                        writer.add(name, checkpoint.read_finite(name))
                job.task.advance(note=block.name)

    def _packed(self, weight: QuantizedWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
        from optkit.algorithms.packing import pack_compressed_tensors, pack_gptq

        if self.format == GPTQ:
            return pack_gptq(weight)
        return pack_compressed_tensors(weight, self.symmetric, scale_dtype)

    def _grid(self, skeleton: Skeleton, name: str) -> Grid:
        import torch

        from optkit.algorithms.grid import Grid
        from optkit.model.skeleton import TORCH_DTYPES

        stored = TORCH_DTYPES[skeleton.checkpoint.tensors[f"{name}.weight"].dtype]
        scale_dtype = torch.float16 if self.format == GPTQ else stored
        return Grid(self.bits, self.group_size, self.symmetric, scale_dtype)


@contextmanager
def out_of_memory(where: str, device: str, remedy: str) -> Iterator[None]:
    """Turn an allocation that failed into a ResourceError that names the layer or block and what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        import torch

        on_gpu = isinstance(error, torch.OutOfMemoryError)
        reason = next(iter(str(error).splitlines()), "")
        what = f"the memory of {device} is full" if on_gpu else "the main memory is full"
        raise ResourceError(what, where=where, why=reason, remedy=remedy) from error


def _recount(after: Checkpoint, before: Checkpoint, selection: Selection) -> dict[str, float]:
    """Return the bits per weight of the whole model and of the quantized layers, counted from the headers of the written files."""
    chosen = selection.layers
    packed = {name: info for name, info in after.tensors.items() if name.rpartition(".")[0] in chosen and not name.endswith(".bias")}
    weights = sum(before.tensors[f"{name}.weight"].elements for name in chosen)
    packed_bits = 8 * sum(info.size_bytes for info in packed.values())
    return {
        "bits_per_weight": round(8 * after.shape.size_bytes / before.shape.elements, 4),
        "quantized_bits_per_weight": round(packed_bits / weights, 4),
    }
