"""A checkpoint as the model that ONNX Runtime GenAI's builder reads.
It has float layers, and layers that hold the codes of a quantized one.

The builder makes a MatMulNBits (com.microsoft) of a layer that has these attributes, K =
`in_features`, N = `out_features`:

    qweight  uint8 [N, groups, group_size * bits / 8]   codes along the inputs, the first in the lowest bits
    scales   float [N, groups]
    qzeros   uint8 [N, ceil(groups * bits / 8)]         zero points, packed along the groups

A group of MatMulNBits is a power of two from 16 to 256 wide. A wider or odder group is told as
several of the same scale: 96 inputs are three groups of 32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from optkit.algorithms.grid import Grid, QuantizedWeight, round_to_nearest
from optkit.algorithms.packing import in_bytes
from optkit.algorithms.scale_search import search_scales
from optkit.kernels.open_packed import fill_, match_packed
from optkit.kernels.packed_linear import PackedWeight
from optkit.kernels.quant_methods import quantized_layers
from optkit.kernels.stored_layer import QuantizedLayer
from optkit.model.checkpoint import Checkpoint
from optkit.model.empty_model import stored_dtype
from optkit.model.skeleton import Skeleton
from optkit.onnx.matmul_nbits_limits import GROUP_SIZES, head_group_size, unfit, why_not_matmul_nbits
from optkit.progress import SilentProgress

PACKED_TOGETHER = ("q_proj", "k_proj", "v_proj")
"""Layers that the builder makes one MatMulNBits of if they have the same bits."""
FUSED = {"qkv_proj": PACKED_TOGETHER, "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers of several ones (Phi-3), and what the builder calls these; it cuts float weights alone."""


class CodedLinear(nn.Module):
    """What the builder looks for in a quantized layer; it computes nothing."""

    g_idx: None = None
    """Inputs are grouped in order."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        """Raises ValueError if no group of MatMulNBits divides those of the weight."""
        super().__init__()
        self.out_features, self.in_features = weight.codes.shape
        self.bits, self.bias = weight.bits, bias
        self.group_size = weight.group_size
        self.scales, self.zeros = weight.scales, weight.zeros
        self._bytes = in_bytes(weight.codes, weight.bits)
        self.narrow_(gcd(weight.group_size, GROUP_SIZES[-1]))

    def narrow_(self, group_size: int) -> None:
        """Cut each group into several of the same scale and zero point."""
        repeats, rest = divmod(self.group_size, group_size)
        if rest or group_size < GROUP_SIZES[0]:
            raise ValueError(f"groups of {self.group_size} inputs cannot be cut into groups of {group_size}")
        self.scales, self.zeros = (each.repeat_interleave(repeats, dim=1) for each in (self.scales, self.zeros))
        self.group_size = group_size

    def cut(self, sizes: Sequence[int]) -> Iterator[CodedLinear]:
        """Yield layers of so many outputs each, in order."""
        parts = (each.split(list(sizes)) for each in (self._bytes, self.scales, self.zeros))
        biases = self.bias.split(list(sizes)) if self.bias is not None else [None] * len(sizes)
        for size, codes, scales, zeros, bias in zip(sizes, *parts, biases, strict=True):
            part = copy(self)
            part.out_features, part._bytes, part.scales, part.zeros, part.bias = size, codes, scales, zeros, bias
            yield part

    @property
    def qweight(self) -> Tensor:
        """uint8 [out, groups, bytes of a group]."""
        return self._bytes.view(self.out_features, self.in_features // self.group_size, -1)

    @property
    def qzeros(self) -> Tensor:
        """uint8 [out, bytes of all zero points]."""
        return in_bytes(self.zeros, self.bits, fill=1 << (self.bits - 1))


def exact_codes(name: str, weight: PackedWeight | None) -> QuantizedWeight:
    """Return codes, scales and zero points of a packed weight. Raises StageError if MatMulNBits
    cannot hold them.
    """
    if weight is None:
        raise unfit(name, "its weight is not integer codes with scales")
    if weight.group_size is None or weight.group_of_input is not None:
        raise unfit(name, "its inputs are grouped out of order (activation order)")
    if reason := why_not_matmul_nbits(weight.bits, weight.group_size):
        raise unfit(name, reason)
    zeros = weight.zeros
    if zeros is None:
        zeros = torch.full(weight.scales.shape, 1 << (weight.bits - 1), dtype=torch.uint8)
    if int(zeros.max()) >= 1 << weight.bits:
        raise unfit(name, f"it has the zero point {int(zeros.max())}, which {weight.bits} bits cannot say")
    return QuantizedWeight(weight.codes(), weight.scales, zeros, weight.bits)


def _coded(layer: QuantizedLayer, bias: Tensor | None, _dtype: torch.dtype, device: str) -> tuple[nn.Module, str]:
    return CodedLinear(exact_codes(layer.name, layer.integers(device)), bias), ""


def handed_over(directory: Path, head_bits: int | None, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model of a checkpoint as the builder reads it.
    With `head_bits`, lm_head is rounded to so many bits.

    Norms are in float32: the builder adds 1 to those of some models, which bfloat16 would round.
    Raises StageError for layers that MatMulNBits cannot hold, SourceError if weights and model
    do not belong together.
    """
    checkpoint = Checkpoint(directory)
    quantized = quantized_layers(checkpoint)
    if quantized:
        dtype = stored_dtype(checkpoint)
        matched = match_packed(checkpoint, quantized, dtype, trust_remote_code)
        fill_(matched, checkpoint, "cpu", dtype, SilentProgress(), _coded)
        model = matched.model
    else:
        skeleton = Skeleton(checkpoint, trust_remote_code=trust_remote_code)
        skeleton.load_("", "cpu")
        model = skeleton.model
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = parameter.data.float()
    _take_apart_(model)
    for module in model.modules():
        _group_alike_([getattr(module, name, None) for name in PACKED_TOGETHER])
    if head_bits:
        head: Any = model.get_output_embeddings()
        model.set_output_embeddings(CodedLinear(rounded(head.weight, head_bits), head.bias))  # type: ignore[no-untyped-call]
    return model


@torch.no_grad()
def rounded(weight: Tensor, bits: int) -> QuantizedWeight:
    """Return a float weight, [out, in], rounded to nearest with the least squared error."""
    grid = Grid(bits, head_group_size(weight.shape[1], bits), symmetric=False)
    scales, zeros = search_scales(weight.float(), grid)
    return round_to_nearest(weight.float(), scales, zeros, grid)


def _take_apart_(model: PreTrainedModel) -> None:
    """Put the layers that one layer of codes consists of in its place."""
    heads, key_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    for module in list(model.modules()):
        for name, parts in FUSED.items():
            if isinstance(layer := getattr(module, name, None), CodedLinear):
                shares = (heads, key_heads, key_heads) if name == "qkv_proj" else (1, 1)
                delattr(module, name)
                sizes = [layer.out_features * share // sum(shares) for share in shares]
                for part, made in zip(parts, layer.cut(sizes), strict=True):
                    setattr(module, part, made)


def _group_alike_(layers: list[Any]) -> None:
    coded = [layer for layer in layers if isinstance(layer, CodedLinear)]
    if len(coded) == len(layers):
        for layer in coded:
            layer.narrow_(min(each.group_size for each in coded))
