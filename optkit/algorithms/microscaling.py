"""MXFP4 and NVFP4: 4-bit floats (E2M1) in scaled blocks, as compressed-tensors 0.19 stores them.

    mxfp4-pack-quantized (OCP Microscaling Formats 1.0, 2023): blocks of 32 inputs, scales are powers of two
        weight_packed        uint8 [out, in / 2]: two codes a byte, the even input in the low half
        weight_scale         uint8 [out, in / 32]: E8M0, the scale is 2^(stored - 127)
    nvfp4-pack-quantized (NVIDIA 2025): blocks of 16 inputs, scales of 8 bits and one of 32 bits for the whole weight
        weight_packed        as above
        weight_scale         float8_e4m3fn [out, in / 16]
        weight_global_scale  float32 [1]: what the scales are divided by
        input_global_scale   float32 [1]: the same of inputs, if engines round them to NVFP4 too

A code is the sign in bit 3 and an index into `E2M1` below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optkit.algorithms.column_kernels import Numbers
from optkit.algorithms.packing import from_bytes, in_bytes
from optkit.algorithms.scale_search import CHUNK
from optkit.algorithms.scaled_gptq import compensated_codes
from optkit.algorithms.threads import one_thread

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of a code's lower three bits."""
LARGEST = E2M1[-1]
NUMBERS = Numbers(mantissa=1, least=0, lowest=-6, highest=6)
MXFP4_BLOCK = 32
NVFP4_BLOCK = 16
E8M0_BIAS = 127
E4M3_LARGEST = 448.0
E4M3_SMALLEST = 2.0**-9
E4M3_EPSILON = 2.0**-3
"""The scale of a block of inputs that are all too small for one."""
E4M3_TOP, E4M3_POWERS = 8, 17
"""E4M3 has the powers of two from 2^-9 to 2^8."""
NVFP4_TRIED = 10
"""E4M3 has eight values from one power of two to the next, so that many above amax / 8 reach beyond
amax / 4.
"""


@dataclass(frozen=True)
class MicroscaledWeight:
    """A weight in E2M1 with a scale for each block of inputs."""

    codes: Tensor
    """uint8 [out, in], below 16."""
    scales: Tensor
    """uint8 (E8M0) or float8_e4m3fn [out, blocks]."""
    global_scale: Tensor | None = None
    """float32 [1], of NVFP4 only."""

    def dequantize(self) -> Tensor:
        """Return float32 [out, in]."""
        scales = self.float_scales().unsqueeze(-1)
        return _blocks(self.values(), self.codes.shape[1] // self.scales.shape[1]).mul_(scales).flatten(1)

    def values(self) -> Tensor:
        """Return what the codes stand for, float32 [out, in]."""
        return torch.tensor([*E2M1, *(-value for value in E2M1)], device=self.codes.device)[self.codes.int()]

    def float_scales(self) -> Tensor:
        """Return what the codes of each block are multiplied by, float32 [out, blocks]."""
        if self.global_scale is None:
            return exponent_scales(self.scales)
        return self.scales.float() / self.global_scale


def round_to_e2m1(values: Tensor) -> Tensor:
    """Return the nearest values of E2M1, ties to the even code, cut at 6; float32 of any shape."""
    step = e2m1_steps(values.abs())
    return (values / step).round_().mul_(step).clamp_(-LARGEST, LARGEST)


def e2m1_steps(sizes: Tensor) -> Tensor:
    """Return how far the values of E2M1 around magnitudes, float32 of any shape, are apart."""
    return torch.where(sizes < 2, 0.5, torch.where(sizes < 4, 1.0, 2.0))


def exponent_scales(stored: Tensor) -> Tensor:
    """Return the float32 scales of E8M0, uint8 of any shape."""
    return torch.ldexp(torch.ones_like(stored, dtype=torch.float32), stored.int() - E8M0_BIAS)


def rounded_inputs(hidden: Tensor, global_scale: Tensor | None) -> Tensor:
    """Return inputs, float [..., in], rounded to NVFP4 with a global scale, float32 [1], or to MXFP4.

    Each block's scale reaches its largest input, in the order of operations of compressed-tensors 0.19.
    """
    blocks = hidden.unflatten(-1, (-1, MXFP4_BLOCK if global_scale is None else NVFP4_BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    if global_scale is None:
        scales = exponent_scales(_nearest_exponents(largest.float()).clamp(1, 2 * E8M0_BIAS).to(torch.uint8))
    else:
        stored = (largest / LARGEST * global_scale).clamp(max=E4M3_LARGEST).to(torch.float8_e4m3fn).float()
        scales = torch.where(stored > 0, stored, E4M3_EPSILON) / global_scale
    return round_to_e2m1(blocks / scales).mul_(scales).to(hidden.dtype).flatten(-2)


def quantize_mxfp4(weight: Tensor, search: bool = False, importance: Tensor | None = None) -> MicroscaledWeight:
    """Round float [out, in] to MXFP4.

    The exponent is floor(log2(amax)) - 2, and one more from amax = 1.75 * 2^n on, as
    compressed-tensors has it (the specification leaves that step out and cuts those blocks).
    `search`: the one of the exponents around it with the least squared error. importance: float
    [in], what an error at each input counts, all 1 if None.
    """
    return _quantize(weight, MXFP4_BLOCK, lambda blocks: _exponents(blocks, search), exponent_scales, importance)


def quantize_nvfp4(
    weight: Tensor, global_scale: Tensor, search: bool = False, importance: Tensor | None = None
) -> MicroscaledWeight:
    """Round float [out, in] to NVFP4 with a global scale, float32 [1] (`nvfp4_global_scale`).

    The scale of a block maps its largest weight to 6. `search`: the E4M3 scale with the least
    squared error of those that map it to something from 4 to 8; 4 is "four over six" (Cook et
    al. 2025) and more than 6 cuts it. importance: as of `quantize_mxfp4`.
    """

    def candidates(blocks: Tensor) -> list[Tensor]:
        largest = blocks.abs().amax(-1) * global_scale
        if not search:
            return [(largest / LARGEST).clamp(E4M3_SMALLEST, E4M3_LARGEST).to(torch.float8_e4m3fn)]
        first = (largest / 8).clamp(E4M3_SMALLEST, E4M3_LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
        top = torch.tensor(E4M3_LARGEST).to(torch.float8_e4m3fn).view(torch.uint8).item()
        return [(first + up).clamp(max=int(top)).view(torch.float8_e4m3fn) for up in range(NVFP4_TRIED)]

    weighed = _quantize(weight, NVFP4_BLOCK, candidates, lambda stored: stored.float() / global_scale, importance)
    return replace(weighed, global_scale=global_scale)


def compensated(weight: Tensor, rounded: MicroscaledWeight, hessian: Tensor) -> MicroscaledWeight:
    """Return a rounded weight with the codes of GPTQ; its scales stay.

    weight: float32 [out, in]; hessian: float32 [in, in]. Raises ValueError as `compensated_codes`.
    """
    tile = (1, weight.shape[1] // rounded.scales.shape[1])
    values = compensated_codes(weight, hessian, rounded.float_scales(), tile, round_to_e2m1, NUMBERS)
    return replace(rounded, codes=codes_of(values, values < 0))


def nvfp4_global_scale(weights: Iterable[Tensor]) -> Tensor:
    """Return float32 [1], the global scale that weights share, from their largest weight.
    Kernels that fuse layers ask for one scale.
    """
    largest = torch.stack([weight.abs().max().float() for weight in weights]).max()
    reach = LARGEST * E4M3_LARGEST
    tiny = largest < reach / torch.finfo(torch.float32).max
    return torch.where(tiny, 1.0, reach / largest).reshape(1)


def exact_nvfp4_scale(weights: Iterable[Tensor]) -> Tensor | None:
    """Return float32 [1], the global scale with which NVFP4 holds weights without any error.
    None if it cannot.

    It can if each block of 16 is E2M1 times a power of two, as all blocks of MXFP4 are, and the
    powers span no more than those of E4M3. A block's largest weight is 4 or 6 then.
    """
    lowest, highest = [], []
    for weight in weights:
        for part in weight.split(max(1, CHUNK[weight.device.type] // weight.shape[1])):
            blocks = _blocks(part.float(), NVFP4_BLOCK)
            largest = blocks.abs().amax(-1)
            exponents = torch.frexp(largest).exponent - 3
            steps = torch.ldexp(torch.ones_like(largest), exponents).unsqueeze(-1)
            if not torch.equal(round_to_e2m1(blocks / steps) * steps, blocks):
                return None
            if len(used := exponents[largest > 0]):
                lowest.append(int(used.min()))
                highest.append(int(used.max()))
    if not highest or max(highest) - min(lowest) > E4M3_POWERS:
        return None
    return torch.tensor([2.0 ** (E4M3_TOP - max(highest))], device=blocks.device)


def pack(weight: MicroscaledWeight) -> dict[str, Tensor]:
    """Return the tensors of one linear layer as compressed-tensors stores them."""
    tensors = {"weight_packed": in_bytes(weight.codes, 4), "weight_scale": weight.scales}
    return tensors if weight.global_scale is None else {**tensors, "weight_global_scale": weight.global_scale.clone()}


def unpack(tensors: Mapping[str, Tensor]) -> MicroscaledWeight:
    """Read the tensors of one linear layer."""
    packed = tensors["weight_packed"]
    codes = from_bytes(packed, 4, 2 * packed.shape[1])
    return MicroscaledWeight(codes, tensors["weight_scale"], tensors.get("weight_global_scale"))


def _blocks(weight: Tensor, size: int) -> Tensor:
    """View float [out, in] as [out, blocks, size]."""
    return weight.view(len(weight), -1, size)


def _exponents(blocks: Tensor, search: bool) -> list[Tensor]:
    """Return E8M0 scales to try, uint8 [out, blocks] each."""
    nearest = _nearest_exponents(blocks.abs().amax(-1))
    return [(nearest + shift).clamp(1, 2 * E8M0_BIAS).to(torch.uint8) for shift in ((0, 1, -1) if search else (0,))]


def _nearest_exponents(largest: Tensor) -> Tensor:
    """Return the exponents, int of any shape, as E8M0 stores them, of blocks with these largest magnitudes."""
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, mantissa from 0.5 to below 1
    return torch.where(largest > 0, exponent - 3 + (mantissa >= 0.875).int(), 0) + E8M0_BIAS


def _quantize(
    weight: Tensor,
    size: int,
    candidates: Callable[[Tensor], list[Tensor]],
    as_float: Callable[[Tensor], Tensor],
    importance: Tensor | None,
) -> MicroscaledWeight:
    """Round each block with the candidate scale of the least squared error, the first of equals."""
    rows = max(1, CHUNK[weight.device.type] // weight.shape[1])
    counts = None if importance is None else _blocks(importance[None], size)
    with one_thread():
        parts = [_round(_blocks(part.float(), size), candidates, as_float, counts) for part in weight.split(rows)]
    codes, scales = zip(*parts, strict=True)
    return MicroscaledWeight(torch.cat(codes), torch.cat(scales))


def _round(
    blocks: Tensor,
    candidates: Callable[[Tensor], list[Tensor]],
    as_float: Callable[[Tensor], Tensor],
    counts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """float32 [out, blocks, size] -> codes, uint8 [out, in], and scales [out, blocks]."""
    chosen, *others = candidates(blocks)
    if others:
        least = _error(blocks, as_float(chosen), counts)
        for tried in others:
            error = _error(blocks, as_float(tried), counts)
            better = error < least
            least = torch.where(better, error, least)
            chosen = torch.where(better, tried.view(torch.uint8), chosen.view(torch.uint8)).view(tried.dtype)
    scaled = blocks / as_float(chosen).unsqueeze(-1)
    return codes_of(round_to_e2m1(scaled), scaled < 0).flatten(1), chosen


def codes_of(values: Tensor, negative: Tensor) -> Tensor:
    """Return the codes, uint8, of values of E2M1; both of any shape."""
    index = torch.bucketize(values.abs(), torch.tensor(E2M1, device=values.device), out_int32=True)
    return (index | negative.int() << 3).to(torch.uint8)


def _error(blocks: Tensor, scales: Tensor, counts: Tensor | None) -> Tensor:
    scales = scales.unsqueeze(-1)
    errors = round_to_e2m1(blocks / scales).mul_(scales).sub_(blocks).square_()
    return (errors if counts is None else errors.mul_(counts)).sum(-1)
