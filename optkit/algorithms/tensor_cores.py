"""Products of float32 matrices by the tensor cores of GPUs.

These multiply bfloat16 numbers, without an error, and add in float32. What they add is cut off, not
rounded, at each step: the diagonal of a sum over 16,384 numbers was too small by 8e-5 of itself, and
less in proportion for fewer. So long sums are made of several.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

LONGEST = 4096
"""Numbers that are summed at once."""


FIRST = (8, 0)
"""The compute capability that multiplies bfloat16 on tensor cores."""


def has_tensor_cores(tensor: Tensor) -> bool:
    """Say whether bfloat16 products are fast on the device of a tensor."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= FIRST


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, float [..., rows, columns]; of float32 on GPUs from three bfloat16 products.
    It was off by 1e-5 of its norm; float32's own are by 1e-6, in two to three times the time.
    """
    if left.dtype != torch.float32 or not has_tensor_cores(left):
        return left @ right
    total = left.new_zeros(*left.shape[:-1], right.shape[-1])
    pieces = zip(left.split(LONGEST, -1), right.split(LONGEST, -2), strict=True)
    for (high, low), (top, rest) in ((bfloat16_parts(one, 2), bfloat16_parts(other, 2)) for one, other in pieces):
        for one, other in ((high, top), (high, rest), (low, top)):
            add_product_(total, one, other)
    return total


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right, bfloat16 [..., rows, length] @ [..., length, columns], to float32 on a GPU."""
    if total.dim() == 2:  # in one pass over the total
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
    else:
        total += torch.bmm(left, right, out_dtype=torch.float32)


def bfloat16_parts(tensor: Tensor, count: int) -> Iterator[Tensor]:
    """Yield bfloat16 tensors whose sum is float32 [...] to 8 bits for each; three are exact."""
    rest = tensor
    for left in reversed(range(count - 1)):
        yield (part := rest.to(torch.bfloat16))
        rest = rest - part if left else torch.sub(rest, part, out=torch.empty_like(part))
    yield rest
