"""Stage `dequantize`: the float weights that packed ones stand for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from optkit.errors import SourceError
from optkit.model.as_floats import refuse_left_apart
from optkit.model.checkpoint import Checkpoint, all_finite
from optkit.model.packed_floats import (
    float_dtype,
    float_shape,
    forget_packing,
    left_out,
    notes_on_floats,
    packed_floats,
    unpacking_bytes,
)
from optkit.model.shape import ModelShape
from optkit.model.task import EVERY_TASK, Task
from optkit.model.writer import SHARD_BYTES, CheckpointWriter, copy_companions
from optkit.stage import Context, Cost, Format, Report, Transform

if TYPE_CHECKING:
    from torch import Tensor


class Dequantize(Transform):
    """Store the float weights that packed ones stand for, and forget how they were packed.
    A recipe needs it only to choose a dtype: most stages unpack what they read themselves, and it is
    put in front of others.
    """

    kind: ClassVar[str] = "dequantize"
    example: ClassVar[str] = "- dequantize: {dtype: bfloat16}"
    for_tasks: ClassVar[frozenset[Task]] = EVERY_TASK
    accepts: ClassVar[frozenset[Format]] = frozenset({Format.QUANTIZED})
    shorthand: ClassVar[str] = "dtype"

    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """The dtype of the float weights. Left out: what config.json says, else bfloat16."""

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Unpack tensor by tensor; at most one shard is in memory, and no model is built.

        Raises SourceError for a form that is not known here, for tensors that do not fit each other,
        and for weights that are NaN or infinite.
        """
        import torch

        from optkit.kernels.float_weights import float_weights

        checkpoint = Checkpoint(source)
        shape, dtype = checkpoint.shape, self._dtype(checkpoint.shape)
        weights, floats = float_weights(checkpoint), packed_floats(shape)
        stands_for = {part: name for name, each in floats.items() for part in each.parts}
        left = float_shape(shape, dtype)
        with (
            context.progress.task("dequantize", len(left.tensors), "tensors") as task,
            CheckpointWriter(target) as writer,
        ):
            for name in dict.fromkeys(stands_for.get(name, name) for name in shape.tensors):
                if name in floats:
                    tensor = weights[name].dequantize(getattr(torch, dtype), context.device)
                    _refuse_infinite(tensor, f"{source}: {name}", dtype)
                    writer.add(name, tensor)
                elif name in left.tensors:
                    writer.add(name, checkpoint.read_finite(name))
                task.advance(note=name)
        copy_companions(source, target, context.trust_remote_code, left.config)
        forget_packing(target)
        return Report(
            changed=len(floats),
            dropped=left_out(shape),
            details={
                "quant_method": shape.quant_method,
                "dtype_after": dtype,
                "size_bytes_before": shape.size_bytes,
                "size_bytes_after": writer.size_bytes,
            },
            notes=self._notes(shape),
        )

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return the exact size, and the memory of one shard and of the largest weight.
        Raises StageError as `refuse_left_apart` does.
        """
        dtype = self._dtype(shape)
        left = float_shape(shape, dtype)
        refuse_left_apart(left)
        joined = max(
            (left.tensors[name].size_bytes for name, each in packed_floats(shape).items() if len(each.shape) == 3),
            default=0,
        )
        largest, gpu = unpacking_bytes(shape, device)
        ram = min(left.size_bytes, SHARD_BYTES) + joined + largest
        return Cost(disk_bytes=left.size_bytes, ram_bytes=ram, gpu_bytes=gpu, notes=self._notes(shape)), left

    def _dtype(self, shape: ModelShape) -> str:
        return self.dtype or float_dtype(shape)

    def _notes(self, shape: ModelShape) -> tuple[str, ...]:
        return notes_on_floats(shape, f"are {self._dtype(shape)} for the stages behind it")


def _refuse_infinite(tensor: Tensor, where: str, dtype: str) -> None:
    if not all_finite(tensor):
        raise SourceError(
            "its packed weights stand for NaN or infinite ones",
            where=where,
            why=f"They were damaged, or do not fit {dtype}",
            remedy="Take the checkpoint from its source again, or set another dtype",
        )
