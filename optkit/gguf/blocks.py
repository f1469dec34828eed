"""Codes of 4 or 8 bits as the blocks of 32 inputs that ggml has for them.

    Q8_0  scale float16, 32 codes int8               code * scale
    Q4_0  scale float16, 32 codes of 4 bits          (code - 8) * scale
    Q4_1  scale and least float16, 32 codes          code * scale + least

Of 4 bits the first 16 codes are the low halves of the bytes, the others the high ones
(https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h).
"""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.errors import StageError
from optkit.kernels.packed_linear import PackedWeight

BLOCK = 32


def block_type(name: str, weight: PackedWeight | None) -> str:
    """Return the type whose grid a packed weight has. Raises StageError if there is none."""
    if weight is None:
        raise _unfit(name, "its weight is not integer codes with scales")
    if weight.group_of_input is not None:
        raise _unfit(name, "its inputs are grouped out of order (activation order)")
    if (size := weight.group_size) is None or size % BLOCK:
        raise _unfit(name, f"its groups of {size or 'several sizes of'} inputs are no multiple of {BLOCK}")
    symmetric = weight.zeros is None or bool((weight.zeros == 1 << (weight.bits - 1)).all())
    if (found := {(4, True): "Q4_0", (4, False): "Q4_1", (8, True): "Q8_0"}.get((weight.bits, symmetric))) is None:
        raise _unfit(name, f"it has {weight.bits} bits{'' if symmetric else ' with zero points'}")
    return found


def blocks_of(name: str, weight: PackedWeight) -> Tensor:
    """Return the blocks of a weight's very codes, uint8 [out, bytes of a row]. A group of several
    blocks has its scale in each.

    Scales and least values are rounded to float16, which ggml has them in. Raises StageError if
    one has no float16.
    """
    kind = block_type(name, weight)
    repeats = weight.inputs // weight.groups // BLOCK
    scales = weight.scales.to(torch.float16)
    parts = [scales]
    if kind == "Q4_1":
        parts.append((-weight.zeros.float() * scales.float()).to(torch.float16))  # type: ignore[union-attr]
    if not all(bool(part.isfinite().all()) for part in parts) or bool(((scales == 0) & (weight.scales != 0)).any()):
        raise _unfit(name, "some of its scales lie outside of float16")
    codes = weight.codes().view(weight.outputs, -1, BLOCK)
    if kind == "Q8_0":
        packed = (codes.to(torch.int16) - 128).to(torch.int8).view(torch.uint8)
    else:
        packed = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
    heads = [part.repeat_interleave(repeats, dim=1).unsqueeze(-1).view(torch.uint8) for part in parts]
    return torch.cat([*heads, packed], dim=-1).flatten(1)


def _unfit(name: str, why: str) -> StageError:
    return StageError(
        "no type of GGUF has its codes",
        where=name,
        why=why[0].upper() + why[1:],
        remedy=f"Give it 4 bits, or 8 symmetric ones, in groups of {BLOCK} inputs (or multiples), or exclude it",
    )
