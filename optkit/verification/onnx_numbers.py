"""Whether every float in the initializers of an ONNX model is finite, read in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto, TensorProto

PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class FloatBits:
    """How the bits of a float dtype say that a number is none."""

    unsigned: str
    """NumPy's unsigned integer of the same size."""
    exponent: int
    """Bits of the exponent; all of them are set in infinities and NaN."""
    mantissa: int

    @property
    def magnitude(self) -> int:
        """All bits but the sign."""
        return self.exponent | self.mantissa


FLOATS = {
    1: FloatBits("<u4", 0x7F80_0000, 0x007F_FFFF),
    10: FloatBits("<u2", 0x7C00, 0x03FF),
    11: FloatBits("<u8", 0x7FF0_0000_0000_0000, 0x000F_FFFF_FFFF_FFFF),
    16: FloatBits("<u2", 0x7F80, 0x007F),
    19: FloatBits("<u1", 0x7C, 0x03),
}
"""TensorProto.DataType -> bits: FLOAT, FLOAT16, DOUBLE, BFLOAT16, FLOAT8E5M2; the other floats of 8
and 4 bits have no infinities.
"""


def problems_of_numbers(models: Iterable[ModelProto], directory: Path) -> tuple[int, int, list[str]]:
    """Return how many tensors and float numbers were looked at.
    A sentence goes with each tensor with numbers that are none. What several graphs hold counts once.

    Infinities beside zeros alone are a mask, and no problem.
    """
    held = (tensor for model in models for tensor in model.graph.initializer if tensor.data_type in FLOATS)
    tensors = {tensor.SerializeToString(deterministic=True): tensor for tensor in held}.values()
    numbers, problems = 0, []
    for tensor in tensors:
        bits = FLOATS[tensor.data_type]
        nan = infinite = others = False
        for piece in _pieces(tensor, bits, directory):
            numbers += len(piece)
            special = (piece & bits.exponent) == bits.exponent
            found = piece[special] & bits.mantissa
            nan = nan or bool(found.any())
            infinite = infinite or bool((found == 0).any())
            finite = piece[~special] if len(found) else piece
            others = others or bool((finite & bits.magnitude).any())
        if nan or (infinite and others):
            problems.append(f"{tensor.name} holds {'NaN' if nan else 'infinite numbers'}")
    return len(tensors), numbers, problems


def _pieces(tensor: TensorProto, bits: FloatBits, directory: Path) -> Iterator[NDArray[Any]]:
    """Yield a tensor's numbers as unsigned integers, [numbers], `PIECE_BYTES` at most at a time."""
    import numpy as np
    from onnx import numpy_helper

    if tensor.data_location != tensor.EXTERNAL:
        yield np.ascontiguousarray(numpy_helper.to_array(tensor)).reshape(-1).view(bits.unsigned)
        return
    entry = {each.key: each.value for each in tensor.external_data}
    size = np.dtype(bits.unsigned).itemsize
    start, left = int(entry.get("offset") or 0), int(np.prod(tensor.dims, dtype=np.int64))
    while left:
        count = min(left, PIECE_BYTES // size)
        yield np.fromfile(directory / entry["location"], dtype=bits.unsigned, count=count, offset=start)
        start, left = start + count * size, left - count
