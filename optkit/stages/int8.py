"""Stage `int8`: LLM.int8() weights as bitsandbytes stores them; no calibration.
Large inputs are kept out of the 8 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from optkit.common.field_types import NonNegative
from optkit.errors import StageError
from optkit.model.linear_layers import Layer
from optkit.model.task import EVERY_TASK, Task
from optkit.packed_tensors.bitsandbytes import EightBitRows
from optkit.stages.quantizing.bitsandbytes import BitsAndBytesQuantizer

if TYPE_CHECKING:
    from torch import Tensor


class Int8(BitsAndBytesQuantizer):
    """Store weights in 8 bits with bitsandbytes and multiply by LLM.int8() (arXiv:2208.07339):
    large inputs stay in 16 bits.
    """

    kind: ClassVar[str] = "int8"
    example: ClassVar[str] = "- int8: {threshold: 6.0}"
    for_tasks: ClassVar[frozenset[Task]] = EVERY_TASK
    version: ClassVar[int] = 3

    bytes_a_weight: ClassVar[int] = 18

    threshold: NonNegative = 6.0
    """Inputs with a larger value anywhere in their column are multiplied in 16 bits, the others in
    8. 0: all of them in 8.
    """

    def layer_format(self, layer: Layer) -> EightBitRows:
        return EightBitRows(self.threshold)

    def quantized_tensors(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        import torch
        from bitsandbytes.functional import int8_vectorwise_quant

        half = weight.half()
        if not bool(half.isfinite().all()):
            raise StageError(
                f"weights of up to {float(weight.abs().max()):,.0f} do not fit float16",
                where=name,
                why="bitsandbytes casts to it before it rounds to 8 bits",
                remedy="Exclude the layer, or use the stage rtn with bits: 8",
            )
        codes, scales, _ = int8_vectorwise_quant(half)
        return {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
