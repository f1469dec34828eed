"""Integer weights of a few bits, packed into 32-bit words.
They are pack-quantized of compressed-tensors, and GPTQ's own format.

No torch is needed to describe them; `pack` imports it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from optkit.environment import package_version
from optkit.formats.base import COMPRESSED_TENSORS, LayerFormat
from optkit.formats.eight_bit import Activations, EightBitFormat, Number, Scales
from optkit.model.output_layer import HEAD
from optkit.model.shape import TensorInfo

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from optkit.algorithms.grid import QuantizedWeight

GPTQ = "gptq"
GPTQ_GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Group sizes that gptqmodel opens, besides one scale per channel."""
GPTQ_MULTIPLE = 32
"""Inputs and outputs of a layer must be a multiple of this in gptqmodel's and vLLM's kernels."""


class PackedFormat(LayerFormat, Protocol):
    """A form that holds codes of a few bits. Each group of inputs has a scale and a zero point."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        ...

    @property
    def group_size(self) -> int | None:
        """Inputs that share a scale; None: all of them."""
        ...

    @property
    def symmetric(self) -> bool:
        """Whether all zero points are 2^(bits - 1)."""
        ...

    def scale_dtype(self, weight_dtype: str) -> str:
        """Return the dtype of the scales of a layer whose weights had the given one."""
        ...

    def pack(self, weight: QuantizedWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer by their last name."""
        ...


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
        """Return the dtype of the weights."""
        return weight_dtype

    def tensors(self, weight_dtype: str, outputs: int, inputs: int) -> dict[str, TensorInfo]:
        """Return the tensors of one layer by their last name."""
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
        """Return an entry of `config_groups` without `targets`."""
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "group" if self.group_size else "channel",
            "group_size": self.group_size,
            "actorder": "static" if self.activation_order else None,
            "dynamic": False,
        }
        return {"weights": weights, "input_activations": None, "output_activations": None, "format": "pack-quantized"}

    def pack(self, weight: QuantizedWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer by their last name."""
        from optkit.algorithms.packing import pack_compressed_tensors

        return pack_compressed_tensors(weight, self.symmetric, scale_dtype)


@dataclass(frozen=True)
class GptqPacked(Float16Scales):
    """The format of AutoGPTQ, gptqmodel and vLLM, symmetric; see `optkit.algorithms.packing`."""

    bits: int
    group_size: int | None
    method: ClassVar[str] = GPTQ
    symmetric: ClassVar[bool] = True

    def tensors(self, weight_dtype: str, outputs: int, inputs: int) -> dict[str, TensorInfo]:
        """Return the tensors of one layer by their last name."""
        groups = inputs // (self.group_size or inputs)
        return {
            "qweight": TensorInfo("I32", (words(inputs, self.bits), outputs)),
            "qzeros": TensorInfo("I32", (groups, words(outputs, self.bits))),
            "scales": TensorInfo("F16", (groups, outputs)),
            "g_idx": TensorInfo("I32", (inputs,)),
        }

    def model_config(self, formats: Mapping[str, LayerFormat], kept: Iterable[str]) -> dict[str, Any]:
        """Return the `quantization_config`.
        Layers of another form are listed in `dynamic`, as gptqmodel has it.
        """
        others = {
            f"+:^{re.escape(name)}$": {"bits": form.bits, "group_size": form.group_size or -1}
            for name, form in formats.items()
            if isinstance(form, GptqPacked) and form != self
        }
        return {
            "quant_method": GPTQ,
            "bits": self.bits,
            "group_size": self.group_size or -1,
            "sym": True,
            "desc_act": False,
            "lm_head": HEAD in formats,
            "checkpoint_format": "gptq",
            "pack_dtype": "int32",
            "dynamic": {f"-:^{re.escape(name)}$": {} for name in kept} | others,
            "meta": {"quantizer": [f"optkit:{package_version('optkit') or '0'}"]},
        }

    def pack(self, weight: QuantizedWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer by their last name; scales are float16."""
        from optkit.algorithms.packing import pack_gptq

        return pack_gptq(weight)


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
        """Return the dtype of the weights."""
        return weight_dtype

    def pack(self, weight: QuantizedWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of one layer by their last name."""
        from optkit.algorithms.packing import signed_codes

        return {"weight": signed_codes(weight), "weight_scale": weight.scales.to(scale_dtype).contiguous()}


def words(count: int, bits: int) -> int:
    """Return how many 32-bit words `count` codes take."""
    return math.ceil(count * bits / 32)
