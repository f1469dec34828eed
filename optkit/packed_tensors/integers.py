"""Integer weights of a few bits, packed into 32-bit words or a byte each.
They are pack-quantized, naive-quantized and int-quantized of compressed-tensors.

No torch is needed to describe them; `pack` imports it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from optkit.model.shape import TensorInfo
from optkit.packed_tensors.base import COMPRESSED_TENSORS, LayerFormat
from optkit.packed_tensors.eight_bit import Activations, EightBitFormat, Number, Scales

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from optkit.algorithms.grid import QuantizedWeight


class PackedFormat(LayerFormat, Protocol):
    """A form that holds codes of a few bits. Each group of inputs has a scale and a zero point."""

    @property
    def bits(self) -> int:
        """Bits of a code."""

    @property
    def group_size(self) -> int | None:
        """Inputs that share a scale; None: all of them."""

    @property
    def symmetric(self) -> bool:
        """Whether all zero points are 2^(bits - 1)."""

    def scale_dtype(self, weight_dtype: str) -> str:
        """Return the dtype of the scales of a layer whose weights had the given one."""

    def pack(self, weight: QuantizedWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer by their last name."""

    def unpack(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """Undo `pack`; scales stay in their dtype."""


class _Grid:
    @property
    def label(self: PackedFormat) -> str:
        """Return e.g. `4 bits, groups of 64, asymmetric`."""
        groups = f"groups of {self.group_size}" if self.group_size else "per channel"
        return f"{self.bits} bits, {groups}{'' if self.symmetric else ', asymmetric'}"


class Float16Scales(_Grid):
    """What the formats of GPTQ and AWQ share."""

    def scale_dtype(self, weight_dtype: str) -> str:
        """Return float16, whatever the weights were."""
        return "F16"


@dataclass(frozen=True)
class PackQuantized(_Grid):
    """pack-quantized of compressed-tensors (0.19); see `optkit.algorithms.packing`."""

    bits: int
    group_size: int | None
    symmetric: bool
    activation_order: bool = False
    """Whether the inputs were rounded in another order than they are stored in; told to readers,
    who need not care.
    """
    method: ClassVar[str] = COMPRESSED_TENSORS

    def scale_dtype(self, weight_dtype: str) -> str:
        return weight_dtype

    def tensors(self, weight_dtype: str, outputs: int, inputs: int) -> dict[str, TensorInfo]:
        groups = inputs // (self.group_size or inputs)
        tensors = {
            "weight_packed": TensorInfo("I32", (outputs, words(inputs, self.bits))),
            "weight_scale": TensorInfo(weight_dtype, (outputs, groups)),
            "weight_shape": TensorInfo("I64", (2,)),
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = TensorInfo("I32", (words(outputs, self.bits), groups))
        return tensors

    def scheme(self) -> dict[str, Any]:
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "group" if self.group_size else "channel",
            "group_size": self.group_size,
            "actorder": "weight" if self.activation_order else None,
            "dynamic": False,
        }
        return {"weights": weights, "input_activations": None, "output_activations": None, "format": "pack-quantized"}

    def pack(self, weight: QuantizedWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
        from optkit.algorithms.packing import pack_compressed_tensors

        return pack_compressed_tensors(weight, self.symmetric, scale_dtype)

    def unpack(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        from optkit.algorithms.packing import unpack_compressed_tensors

        return unpack_compressed_tensors(tensors, self.bits)


@dataclass(frozen=True)
class BytesQuantized(PackQuantized):
    """naive-quantized of compressed-tensors (0.19): each code is a byte, and the tensor of codes is called weight."""

    @property
    def label(self) -> str:
        """Return e.g. `4 bits, groups of 64, in whole bytes`."""
        return f"{super().label}, in whole bytes"

    def tensors(self, weight_dtype: str, outputs: int, inputs: int) -> dict[str, TensorInfo]:
        scales = super().tensors(weight_dtype, outputs, inputs)["weight_scale"]
        tensors = {"weight": TensorInfo("I8", (outputs, inputs)), "weight_scale": scales}
        return tensors if self.symmetric else tensors | {"weight_zero_point": TensorInfo("I8", scales.shape)}

    def scheme(self) -> dict[str, Any]:
        return super().scheme() | {"format": "naive-quantized"}

    def pack(self, weight: QuantizedWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
        from optkit.algorithms.packing import signed_codes

        codes = signed_codes(weight.codes, weight.bits)
        tensors = {"weight": codes, "weight_scale": weight.scales.to(scale_dtype).contiguous()}
        return tensors if self.symmetric else tensors | {"weight_zero_point": signed_codes(weight.zeros, weight.bits)}

    def unpack(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        from optkit.algorithms.packing import unpack_bytes

        return unpack_bytes(tensors, self.bits)


@dataclass(frozen=True)
class IntQuantized(EightBitFormat):
    """int-quantized of compressed-tensors: 8-bit codes, a scale for each output channel.
    Inputs are rounded with a scale for each token.
    """

    number: Number = "int"
    scales: Scales = "channel"
    activations: Activations = "dynamic"
    bits: ClassVar[int] = 8
    group_size: ClassVar[int | None] = None
    symmetric: ClassVar[bool] = True

    def scale_dtype(self, weight_dtype: str) -> str:
        return weight_dtype

    def pack(self, weight: QuantizedWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
        from optkit.algorithms.packing import signed_codes

        codes = signed_codes(weight.codes, weight.bits)
        return {"weight": codes, "weight_scale": weight.scales.to(scale_dtype).contiguous()}

    def unpack(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        from optkit.algorithms.packing import unpack_bytes

        return unpack_bytes(tensors, self.bits)


def words(count: int, bits: int) -> int:
    """Return how many 32-bit words `count` codes take."""
    return math.ceil(count * bits / 32)
