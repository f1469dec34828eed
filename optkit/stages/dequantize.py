"""Stage `dequantize`: the float weights that packed ones stand for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from optkit.errors import SourceError
from optkit.model.checkpoint import Checkpoint, all_finite
from optkit.model.packed_floats import activation_scales, cache_scales, float_shape, packed_floats
from optkit.model.schemes import rounds_activations
from optkit.model.shape import ModelShape
from optkit.model.task import EVERY_TASK, Task
from optkit.model.writer import SHARD_BYTES, CheckpointWriter, copy_companions, write_config
from optkit.stage import Context, Cost, Format, Report, Transform
from optkit.stages.cast import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

STALE = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files that say how the weights were packed."""
WORK_BYTES = 12
"""What unpacking a weight takes: its codes as integers, in float32, and rounded."""


class Dequantize(Transform):
    """Store the float weights that packed ones stand for, and forget how they were packed.
    A recipe needs it only to choose a dtype: it is put in front of a stage that needs floats.
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
        left = float_shape(shape, dtype, DTYPES[dtype])
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
        copy_companions(source, target, context.trust_remote_code)
        for name in STALE:
            (target / name).unlink(missing_ok=True)
        write_config(target, left.config)
        return Report(
            changed=len(floats),
            dropped={
                **dict.fromkeys(cache_scales(shape), "a scale of the KV cache, which is of floats now"),
                **dict.fromkeys(activation_scales(floats.values()), "a scale of activations, which are floats now"),
            },
            details={
                "quant_method": str(shape.config["quantization_config"]["quant_method"]),
                "dtype_after": dtype,
                "size_bytes_before": shape.size_bytes,
                "size_bytes_after": writer.size_bytes,
            },
            notes=self._notes(shape),
        )

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return the exact size, and the memory of one shard and of the largest weight."""
        dtype = self._dtype(shape)
        left = float_shape(shape, dtype, DTYPES[dtype])
        packed = [(left.tensors[name], left.tensors[name].shape) for name in packed_floats(shape)]
        joined = max((info.size_bytes for info, sizes in packed if len(sizes) == 3), default=0)
        largest = max(info.elements // (sizes[0] if len(sizes) == 3 else 1) for info, sizes in packed) * WORK_BYTES
        on_gpu = device.startswith("cuda")
        ram = min(left.size_bytes, SHARD_BYTES) + joined + (largest // 3 if on_gpu else largest)
        gpu = largest if on_gpu else 0
        return Cost(disk_bytes=left.size_bytes, ram_bytes=ram, gpu_bytes=gpu, notes=self._notes(shape)), left

    def _dtype(self, shape: ModelShape) -> str:
        said = str(shape.config.get("dtype") or shape.config.get("torch_dtype"))
        return self.dtype or (said if said in DTYPES else "bfloat16")

    def _notes(self, shape: ModelShape) -> tuple[str, ...]:
        words = shape.config["quantization_config"]
        said = f"the weights, packed by {words.get('quant_method')}, are {self._dtype(shape)} for the stages behind it"
        if rounds_activations(words) or words.get("activation_scheme") or words.get("quant_algo"):
            said += "; the packed model rounds what goes into its layers too, the float one does not"
        return (said,)


def _refuse_infinite(tensor: Tensor, where: str, dtype: str) -> None:
    if not all_finite(tensor):
        raise SourceError(
            "its packed weights stand for NaN or infinite ones",
            where=where,
            why=f"They were damaged, or do not fit {dtype}",
            remedy="Take the checkpoint from its source again, or set another dtype",
        )
