"""A packed integer weight from the tensors of either format, and its layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optkit.algorithms.packing import packed_length
from optkit.errors import SourceError
from optkit.kernels.cpu.coded_linear import CodedLinear, why_not_coded
from optkit.kernels.cpu.native import precision
from optkit.kernels.cuda.matrix import tiled, why_not_tiled
from optkit.kernels.cuda.tiled_linear import TiledLinear
from optkit.kernels.embedding_bag_linear import BagLinear, why_not_bag
from optkit.kernels.packed_linear import PackedLinear, PackedWeight
from optkit.kernels.stored_layer import QuantizedLayer
from optkit.progress import ToActOn

BITS = (2, 3, 4, 8, 5, 6)
"""Rare ones last: few inputs take as many words in several of them."""


class IntegerLayer(QuantizedLayer):
    """A layer whose weight is codes in groups of inputs: a format says how they lie."""

    @abstractmethod
    def integers(self, device: str) -> PackedWeight:
        """Return its codes, scales and zero points on the device. Raises SourceError if its
        tensors do not fit each other.
        """

    def build(self, bias: Tensor | None, dtype: torch.dtype, device: str) -> tuple[nn.Module, str]:
        return integer_layer(self.integers(device), bias, dtype, device)

    def dequantize(self, dtype: torch.dtype, device: str) -> Tensor:
        return PackedLinear(self.integers(device), None, torch.float32).dequantize().to(dtype)


def bits_of(words: Tensor, scales: Tensor, shape: tuple[int, int], where: str) -> int:
    """Return the bits of a code of `words`, int32 [out, words]. Raises SourceError if words and
    scales are no weight of that shape.
    """
    outputs, inputs = shape
    bits = next((bits for bits in BITS if words.shape == (outputs, packed_length(inputs, bits))), None)
    if bits is None or scales.dim() != 2 or scales.shape[0] != outputs:
        raise SourceError(
            f"words {list(words.shape)} and scales {list(scales.shape)} are no weight [{outputs}, "
            f"{inputs}] of 2 to 6 or 8 bits",
            where=where,
            remedy="Make the artifact again",
        )
    return bits


def packed_weight(
    words: Tensor, scales: Tensor, zeros: Tensor | None, group_of_input: Tensor | None, bits: int, inputs: int
) -> PackedWeight:
    """Return the weight without what says nothing.
    That is zero points that all are 2^(bits - 1), and inputs that are grouped in order.
    """
    if zeros is not None and bool((zeros == 1 << (bits - 1)).all()):
        zeros = None
    return PackedWeight(words, scales, zeros, _out_of_order(group_of_input, scales.shape[1]), bits, inputs)


def integer_layer(weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype, device: str) -> tuple[nn.Module, str]:
    """Return the layer for a packed weight on the device, and a sentence that names it."""
    layer, phrase = packed_layer(weight, bias, dtype, device)
    return layer, type(phrase)(f"int{weight.bits}: {{layers}} {phrase}")


@dataclass(frozen=True)
class Kernel:
    """One way to compute with a packed weight."""

    refuses: Callable[[PackedWeight, torch.dtype, str], str | None]
    """(weight, dtype, device) -> why not, None if it can."""
    build: Callable[[PackedWeight, Tensor | None, torch.dtype], nn.Module]
    phrase: Callable[[PackedWeight], str]
    """What the notes say of it: `use ...`."""


KERNELS: Mapping[str, tuple[Kernel, ...]] = {
    "cpu": (
        Kernel(
            refuses=lambda weight, dtype, device: why_not_coded(weight, device),
            build=CodedLinear,
            phrase=lambda weight: f"use optkit's {weight.bits}-bit CPU kernel, in {precision()}",
        ),
        Kernel(
            refuses=lambda weight, dtype, device: why_not_bag(weight, device),
            build=BagLinear,
            phrase=lambda weight: f"use FBGEMM's {weight.bits}-bit CPU kernel, in float32",
        ),
    ),
    "cuda": (
        Kernel(
            refuses=why_not_tiled,
            build=lambda weight, bias, dtype: TiledLinear(tiled(weight, dtype, bias), weight.order),
            phrase=lambda weight: "use optkit's int4 CUDA kernel",
        ),
    ),
}
"""Of each kind of device the fastest first, which is taken if it can compute a layer."""


def packed_layer(weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype, device: str) -> tuple[nn.Module, str]:
    """Return the layer for a packed weight on the device, and one phrase that names it."""
    reasons: list[str] = []
    for kernel in KERNELS["cpu" if torch.device(device).type == "cpu" else "cuda"]:
        reason = kernel.refuses(weight, dtype, device)
        if reason is None:
            why = f", because {reasons[0]}" if reasons else ""
            return kernel.build(weight, bias, dtype), f"{kernel.phrase(weight)}{why}"
        reasons.append(reason)
    return PackedLinear(weight, bias, dtype), ToActOn(f"are dequantized at each call, because {reasons[-1]}")


def _out_of_order(group_of_input: Tensor | None, groups: int) -> Tensor | None:
    """Return int64 [in], None if inputs are grouped in order."""
    if group_of_input is None or bool((group_of_input < 0).any()):
        return None
    inputs = group_of_input.numel()
    in_order = torch.arange(inputs, device=group_of_input.device) // -(-inputs // groups)
    return None if torch.equal(group_of_input.long(), in_order) else group_of_input.long()
