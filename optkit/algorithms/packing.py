"""Codes of 2 to 8 bits in bytes and in 32-bit words, as compressed-tensors, GPTQ and AWQ store them.

All formats are one dense bit stream: code i of a line occupies bits i * bits .. (i + 1) * bits - 1,
counted from the lowest bit of the first word, and may straddle two words (3, 5 and 6 bits). They differ in
the direction of the lines, in the names, and AWQ in the order of the codes in a word:

    compressed-tensors pack-quantized (compressed_tensors.compressors.pack_quantized, 0.19)
        weight_packed      int32 [out, ceil(in * bits / 32)]       lines along the inputs
        weight_scale       float [out, groups]
        weight_zero_point  int32 [ceil(out * bits / 32), groups]   lines along the outputs; only asymmetric
        weight_shape       int64 [2]: out, in
    GPTQ, checkpoint_format "gptq" (AutoGPTQ, gptqmodel, vLLM)
        qweight            int32 [ceil(in * bits / 32), out]       lines along the inputs
        qzeros             int32 [groups, ceil(out * bits / 32)]   lines along the outputs; zero point - 1
        scales             float16 [groups, out]
        g_idx              int32 [in]: the group of each input
    AWQ, version "gemm" (AutoAWQ, vLLM), 4 bits
        qweight            int32 [in, out / 8]                     lines along the outputs, each eight of them
                                                                   in the order 0 2 4 6 1 3 5 7
        qzeros             int32 [groups, out / 8]                 the same
        scales             float16 [groups, out]
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.algorithms.grid import QuantizedWeight

WORD_BITS = 32
AWQ_BITS = 4
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of each eight, that is at each place of a word, counted from its lowest bits."""


def packed_length(count: int, bits: int) -> int:
    """Return how many words `count` codes take."""
    return math.ceil(count * bits / WORD_BITS)


def in_bytes(codes: Tensor, bits: int, fill: int = 0) -> Tensor:
    """Pack uint8 [rows, count] of 2, 4 or 8 bits along the rows, low bits first: uint8 [rows, ceil(count bits / 8)].

    `fill` stands in the rest of the last byte.
    """
    held = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % held), value=fill)
    packed = padded[:, ::held].clone(memory_format=torch.contiguous_format)
    for place in range(1, held):
        packed |= padded[:, place::held] << (place * bits)
    return packed


def from_bytes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo `in_bytes`: uint8 [..., count]."""
    places = [packed >> place & ((1 << bits) - 1) for place in range(0, 8, bits)]
    return torch.stack(places, dim=-1).flatten(-2)[..., :count]


def pack(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Pack unsigned codes, uint8 [rows, columns] below 2^bits, along `dim`.
    The words are int32 [rows, words] (dim 1) or [words, columns] (dim 0).
    """
    if dim == 0:
        return pack(codes.T, bits, 1).T.contiguous()
    rows, count = codes.shape
    if 8 % bits == 0:  # no code lies in two bytes
        padded = torch.nn.functional.pad(codes, (0, -count % (WORD_BITS // bits)))
        return in_bytes(padded, bits).view(torch.int32)
    padded = torch.nn.functional.pad(codes, (0, -count % WORD_BITS)).view(rows, -1, WORD_BITS)
    words = torch.zeros(rows, padded.shape[1], bits, dtype=torch.int32, device=codes.device)
    for index in range(WORD_BITS):
        word, shift = divmod(index * bits, WORD_BITS)
        code = padded[:, :, index].to(torch.int32)
        words[:, :, word] |= code << shift
        if shift + bits > WORD_BITS:
            words[:, :, word + 1] |= code >> (WORD_BITS - shift)
    return words.view(rows, -1)[:, : packed_length(count, bits)].contiguous()


def unpack(words: Tensor, bits: int, count: int, dim: int) -> Tensor:
    """Undo `pack`: uint8, with `count` codes along `dim`."""
    if dim == 0:
        return unpack(words.T, bits, count, 1).T.contiguous()
    if 8 % bits == 0:  # no code lies in two bytes: 30 times faster
        return from_bytes(words.contiguous().view(torch.uint8), bits, count).contiguous()
    rows, mask = words.shape[0], (1 << bits) - 1
    padded = torch.nn.functional.pad(words, (0, -words.shape[1] % bits)).view(rows, -1, bits)
    codes = torch.empty(rows, padded.shape[1], WORD_BITS, dtype=torch.uint8, device=words.device)
    for index in range(WORD_BITS):
        word, shift = divmod(index * bits, WORD_BITS)
        code = padded[:, :, word] >> shift
        if shift + bits > WORD_BITS:
            kept = WORD_BITS - shift
            code = (code & ((1 << kept) - 1)) | (padded[:, :, word + 1] << kept)
        codes[:, :, index] = (code & mask).to(torch.uint8)
    return codes.view(rows, -1)[:, :count].contiguous()


def pack_compressed_tensors(weight: QuantizedWeight, symmetric: bool, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """Return one layer in the pack-quantized format; a symmetric grid needs no zeros."""
    tensors = {
        "weight_packed": pack(weight.codes, weight.bits, 1),
        "weight_scale": weight.scales.to(scale_dtype).contiguous(),
        "weight_shape": torch.tensor(weight.codes.shape, dtype=torch.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack(weight.zeros, weight.bits, 0)
    return tensors


def unpack_compressed_tensors(tensors: Mapping[str, Tensor], bits: int) -> QuantizedWeight:
    """Undo `pack_compressed_tensors`."""
    outputs, inputs = tensors["weight_shape"].tolist()
    codes, scales = unpack(tensors["weight_packed"], bits, inputs, 1), tensors["weight_scale"]
    packed = tensors.get("weight_zero_point")
    zeros = _middle(scales, bits) if packed is None else unpack(packed, bits, outputs, 0)
    return QuantizedWeight(codes, scales, zeros, bits)


def unpack_bytes(tensors: Mapping[str, Tensor], bits: int) -> QuantizedWeight:
    """Return one layer whose codes, and zero points, are `signed_codes`."""
    scales, zeros = tensors["weight_scale"], tensors.get("weight_zero_point")
    zeros = _middle(scales, bits) if zeros is None else unsigned_codes(zeros, bits)
    return QuantizedWeight(unsigned_codes(tensors["weight"], bits), scales, zeros, bits)


def _middle(scales: Tensor, bits: int) -> Tensor:
    return torch.full_like(scales, 1 << (bits - 1), dtype=torch.uint8)


def signed_codes(codes: Tensor, bits: int) -> Tensor:
    """Return uint8 codes or zero points as int8 centred on 0, as compressed-tensors has them in whole bytes."""
    return (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def unsigned_codes(codes: Tensor, bits: int) -> Tensor:
    """Undo `signed_codes`."""
    return (codes.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)


def pack_gptq(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of one linear layer in GPTQ's format; its zero points must be at least 1."""
    if not bool((weight.zeros > 0).all()):
        raise ValueError("GPTQ's format stores zero - 1 and cannot hold a zero point of 0")
    group_of_input = torch.arange(weight.codes.shape[1], dtype=torch.int32) // weight.group_size
    return {
        "qweight": pack(weight.codes, weight.bits, 1).T.contiguous(),
        "qzeros": pack((weight.zeros - 1).T.contiguous(), weight.bits, 1),
        "scales": weight.scales.T.to(torch.float16).contiguous(),
        "g_idx": group_of_input,
    }


def unpack_gptq(tensors: Mapping[str, Tensor], bits: int) -> QuantizedWeight:
    """Undo `pack_gptq`."""
    scales = tensors["scales"].T.contiguous()
    codes = unpack(tensors["qweight"].T.contiguous(), bits, len(tensors["g_idx"]), 1)
    zeros = unpack(tensors["qzeros"], bits, len(scales), 1).T.contiguous() + 1
    return QuantizedWeight(codes, scales, zeros, bits)


def pack_awq(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return one layer in AutoAWQ's GEMM layout; codes of 4 bits, outputs a multiple of 8."""
    if weight.bits != AWQ_BITS or weight.codes.shape[0] % len(AWQ_ORDER):
        asked = f"{weight.bits} bits for {weight.codes.shape[0]}"
        raise ValueError(f"AWQ's format holds codes of 4 bits for a multiple of 8 outputs, not {asked}")
    return {
        "qweight": pack(_in_eights(weight.codes.T, AWQ_ORDER), AWQ_BITS, 1),
        "qzeros": pack(_in_eights(weight.zeros.T, AWQ_ORDER), AWQ_BITS, 1),
        "scales": weight.scales.T.to(torch.float16).contiguous(),
    }


def unpack_awq(tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    """Read the tensors of one linear layer in AutoAWQ's GEMM layout."""
    outputs = tensors["scales"].shape[1]
    back = tuple(AWQ_ORDER.index(place) for place in range(len(AWQ_ORDER)))
    codes, zeros = (
        _in_eights(unpack(tensors[leaf], AWQ_BITS, outputs, 1), back).T.contiguous() for leaf in ("qweight", "qzeros")
    )
    return QuantizedWeight(codes, tensors["scales"].T.contiguous(), zeros, AWQ_BITS)


def _in_eights(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """Reorder each eight columns of [rows, columns]."""
    rows, columns = codes.shape
    return codes.reshape(rows, columns // len(order), len(order))[:, :, list(order)].flatten(1)
