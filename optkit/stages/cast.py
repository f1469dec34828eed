"""Stage `cast`: the same weights in another float dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import field_validator

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint, all_finite
from optkit.model.packed_floats import DTYPES
from optkit.model.shape import ModelShape, TensorInfo
from optkit.model.task import EVERY_TASK, Task
from optkit.model.writer import SHARD_BYTES, CheckpointWriter, copy_companions
from optkit.stage import Context, Cost, Report, Transform

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = {**DTYPES, "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
"""The dtypes that are cast; those of 8 bits are weights without scales."""
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Cast(Transform):
    """Store every float tensor as `dtype`; integers stay as they are."""

    kind: ClassVar[str] = "cast"
    unpacks: ClassVar[bool] = True
    example: ClassVar[str] = "- cast: bfloat16"
    for_tasks: ClassVar[frozenset[Task]] = EVERY_TASK
    shorthand: ClassVar[str] = "dtype"

    dtype: Literal["bfloat16", "float16", "float32"]
    """The dtype to store the weights in; `bf16`, `fp16` and `fp32` are understood as well."""

    @field_validator("dtype", mode="before")
    @classmethod
    def _spell_out(cls, value: Any) -> Any:
        return SHORT.get(value, value) if isinstance(value, str) else value

    def run(self, source: Path, target: Path, context: Context) -> Report:
        """Cast tensor by tensor; at most one shard is in memory.

        Raises StageError when the model is in that dtype already or a weight would become infinite,
        SourceError for NaN and Inf.
        """
        checkpoint = Checkpoint(source)
        changing = self._changing(checkpoint.shape)
        with (
            context.progress.task("cast", len(checkpoint.tensors), "tensors") as task,
            CheckpointWriter(target) as writer,
        ):
            for name in checkpoint.tensors:
                tensor = checkpoint.read_finite(name)
                writer.add(name, self._cast(name, tensor) if name in changing else tensor)
                task.advance(note=name)
        copy_companions(source, target, context.trust_remote_code, self._config(checkpoint.config))
        before = {name for name, stored in FLOATS.items() for info in changing.values() if info.dtype == stored}
        details = {
            "dtype_before": ", ".join(sorted(before)),
            "dtype_after": self.dtype,
            "size_bytes_before": checkpoint.shape.size_bytes,
            "size_bytes_after": writer.size_bytes,
        }
        return Report(changed=len(changing), details=details)

    def predict(self, shape: ModelShape, device: str) -> tuple[Cost, ModelShape]:
        """Return the exact size, and the memory of one shard and the largest tensor in both dtypes."""
        changing = self._changing(shape)
        tensors = {name: self._stored(info) if name in changing else info for name, info in shape.tensors.items()}
        left = ModelShape(config=self._config(shape.config), tensors=tensors)
        largest = max(info.size_bytes + tensors[name].size_bytes for name, info in shape.tensors.items())
        return Cost(disk_bytes=left.size_bytes, ram_bytes=min(left.size_bytes, SHARD_BYTES) + largest), left

    def _stored(self, info: TensorInfo) -> TensorInfo:
        return replace(info, dtype=DTYPES[self.dtype])

    def _changing(self, shape: ModelShape) -> dict[str, TensorInfo]:
        changing = {
            name: info
            for name, info in shape.tensors.items()
            if info.dtype in FLOATS.values() and info.dtype != DTYPES[self.dtype]
        }
        if not changing:
            raise StageError(
                f"the model is {self.dtype} already",
                where="cast",
                why=f"None of its {len(shape.tensors):,} tensors would change",
                remedy="Take the stage out of the recipe",
            )
        return changing

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        cast = tensor.to(dtype)
        if not all_finite(cast):
            raise StageError(
                f"weights of up to {float(tensor.abs().max()):,.0f} do not fit {self.dtype}",
                where=name,
                why=f"Its largest number is {torch.finfo(dtype).max:,.0f}"
                if self.dtype == "float16"
                else "They would be infinite",
                remedy="Cast to bfloat16" if self.dtype == "float16" else "Keep the dtype that they have",
            )
        return cast

    def _config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json with the new dtype, in nested configs too.
        `torch_dtype`, its old name, goes.
        """
        return self._renamed(config) | {"dtype": self.dtype}

    def _renamed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        dtype_keys = {"dtype", "torch_dtype"}
        named = {"dtype": self.dtype} if any(str(config.get(key)) in FLOATS for key in dtype_keys) else {}
        rest = {
            key: self._renamed(value) if isinstance(value, dict) else value
            for key, value in config.items()
            if key not in dtype_keys
        }
        return rest | named
