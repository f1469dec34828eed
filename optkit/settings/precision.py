"""Setting `precision`: what an opened model computes in, whatever its weights are stored as."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from optkit.common.tensor_float32 import tensor_float32
from optkit.environment import compute_capability
from optkit.errors import StageError
from optkit.model.shape import FLOAT_NAMES, ModelShape
from optkit.stage import Setting

DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Mode -> the torch name of the dtype that the model is opened in."""
AMPERE = (8, 0)
"""The compute capability from which on a GPU has TF32 and bfloat16."""


class Precision(Setting):
    """Compute in another precision than the checkpoint's; evals of accuracy say what that costs.
    `cast` also stores the weights so.
    """

    kind: ClassVar[str] = "precision"
    example: ClassVar[str] = "- precision: bf16"
    shorthand: ClassVar[str] = "mode"
    exact: ClassVar[bool] = False

    mode: Literal["fp32", "tf32", "bf16", "fp16", "autocast"]
    """`fp32`, `bf16`, `fp16`: weights and states are of this dtype. `tf32`: float32, but tensor
    cores round the factors of matrix products to 10 bits of mantissa. `autocast`: float32 weights,
    which torch casts to `dtype` at each matrix product; sums of squares, softmax and the like stay
    in float32."""
    dtype: Literal["bfloat16", "float16"] | None = None
    """Of autocast's matrix products; left out: bfloat16."""

    @model_validator(mode="after")
    def _dtype_of_autocast(self) -> Self:
        if self.dtype is not None and self.mode != "autocast":
            raise ValueError(f"dtype is for autocast: leave it out, {self.mode} says it already")
        return self

    def check(self, shape: ModelShape, device: str, directory: Path | None = None) -> None:
        self._check_device(device)
        if self.mode == "autocast":
            if shape.config.get("quantization_config"):
                raise StageError(
                    "autocast cannot be used with packed weights",
                    where="precision",
                    why="Their layers say themselves what they compute in, so nothing would be cast",
                    remedy="Use bf16 or fp16, in which the states of such a model are computed",
                )
            stored = {info.dtype for info in shape.tensors.values()} & FLOAT_NAMES.keys()
            if stored and "F32" not in stored:
                names = ", ".join(FLOAT_NAMES[name] for name in sorted(stored))
                raise StageError(
                    f"autocast has nothing to cast: the weights are {names}",
                    where="precision",
                    why="It casts float32 weights at each product",
                    remedy="Take it out, or put `- cast: {dtype: float32}` before it",
                )

    def on_load(self, model: Any, device: str) -> Any:
        """Return the model as it is.
        Raises StageError if the device, perhaps another one than it was made on, has no such
        numbers.
        """
        self._check_device(device)
        return model

    def _check_device(self, device: str) -> None:
        if self.mode == "tf32" and device == "cpu":
            raise StageError(
                "tf32 does not run on cpu",
                where="precision",
                why="It is a format of the tensor cores of NVIDIA GPUs",
                remedy="Use fp32 or bf16, or a GPU",
            )
        name = "bfloat16" if self._cast_to == "bfloat16" else self.mode
        capability = compute_capability(device)
        if name in ("tf32", "bfloat16") and capability is not None and capability < AMPERE:
            raise StageError(
                f"this GPU (compute capability {capability[0]}.{capability[1]}) does not compute in {name}",
                where="precision",
                why="GPUs do from 8.0 (Ampere) on",
                remedy="Use fp16 or fp32",
            )

    @property
    def _cast_to(self) -> str | None:
        return (self.dtype or "bfloat16") if self.mode == "autocast" else DTYPES[self.mode]

    def opened_dtype(self) -> str | None:
        """Return the dtype that the model is opened in.
        None for autocast, which keeps the checkpoint's.
        """
        return DTYPES.get(self.mode)

    def computing(self, device: str) -> AbstractContextManager[Any]:
        """Return what every call of the model runs in."""
        if self.mode == "tf32":
            return tensor_float32()
        if self.mode == "autocast":
            import torch

            return torch.autocast(device.partition(":")[0], dtype=getattr(torch, str(self._cast_to)))
        return nullcontext()

    def changes_products(self) -> bool:
        """Say whether products are rounded or cast as they are computed.
        The other modes are the dtype that the model is opened in.
        """
        return self.mode in ("tf32", "autocast")

    def describe(self, device: str) -> str:
        """Return e.g. `precision: autocast to bfloat16`."""
        return f"precision: autocast to {self._cast_to}" if self.mode == "autocast" else f"precision: {self.mode}"
