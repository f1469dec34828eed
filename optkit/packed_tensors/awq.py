"""AutoAWQ's GEMM layout: 4-bit codes with zero points, as vLLM and transformers read them.

No torch is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from optkit.errors import StageError
from optkit.model.linear_layers import Layer
from optkit.model.shape import TensorInfo
from optkit.packed_tensors.base import LayerFormat
from optkit.packed_tensors.integers import Float16Scales

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from optkit.algorithms.grid import QuantizedWeight

AWQ = "awq"
CODES_PER_WORD = 8


@dataclass(frozen=True)
class AwqPacked(Float16Scales):
    """The layout of AutoAWQ's GEMM kernels; see `optkit.algorithms.packing`."""

    group_size: int | None
    method: ClassVar[str] = AWQ
    bits: ClassVar[int] = 4
    symmetric: ClassVar[bool] = False

    def tensors(self, weight_dtype: str, outputs: int, inputs: int) -> dict[str, TensorInfo]:
        groups = inputs // (self.group_size or inputs)
        return {
            "qweight": TensorInfo("I32", (inputs, outputs // CODES_PER_WORD)),
            "qzeros": TensorInfo("I32", (groups, outputs // CODES_PER_WORD)),
            "scales": TensorInfo("F16", (groups, outputs)),
        }

    def model_config(self, formats: Mapping[str, LayerFormat], kept: Iterable[str]) -> dict[str, Any]:
        """Return the `quantization_config`; it has one form for all layers but those that stay."""
        return {
            "quant_method": AWQ,
            "bits": self.bits,
            "group_size": self.group_size or -1,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(kept),
        }

    def pack(self, weight: QuantizedWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
        from optkit.algorithms.packing import pack_awq

        return pack_awq(weight)

    def unpack(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        from optkit.algorithms.packing import unpack_awq

        return unpack_awq(tensors)


def refuse_unfit_for_awq(layers: Sequence[Layer], formats: Mapping[str, LayerFormat], stage: str) -> None:
    """Raise StageError for layers that the layout cannot hold, and if not all have one form."""
    odd = next((layer for layer in layers if layer.outputs % CODES_PER_WORD), None)
    if odd:
        raise StageError(
            f"{odd.outputs} outputs are not a multiple of {CODES_PER_WORD}",
            where=odd.name,
            why="The format awq packs outputs in eights",
            remedy=f"Set {stage}.format to compressed-tensors, or exclude the layer",
        )
    first = next(iter(formats))
    other = next((name for name in formats if formats[name] != formats[first]), None)
    if other:
        raise StageError(
            f"{first} has {formats[first].label} and {other} has {formats[other].label}",
            where=f"{stage}.overrides",
            why="The format awq has one form for all layers",
            remedy=f"Set {stage}.format to compressed-tensors",
        )
