"""Stage `nf4`: weights in 4-bit NormalFloat or 4-bit floats, as bitsandbytes stores them.
No calibration, seconds of work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from optkit.model.linear_layers import Layer, Selection
from optkit.model.task import EVERY_TASK, Task
from optkit.packed_tensors.base import LayerFormat
from optkit.packed_tensors.bitsandbytes import FourBit
from optkit.stages.quantizing.bitsandbytes import BitsAndBytesQuantizer

if TYPE_CHECKING:
    from torch import Tensor


class Nf4(BitsAndBytesQuantizer):
    """Store weights in 4 bits with bitsandbytes, the start of a QLoRA.
    NormalFloat (NF4, arXiv:2305.14314) has blocks of 64.
    """

    kind: ClassVar[str] = "nf4"
    example: ClassVar[str] = "- nf4: {type: nf4, double_quantization: true}"
    for_tasks: ClassVar[frozenset[Task]] = EVERY_TASK

    type: Literal["nf4", "fp4"] = "nf4"
    """`nf4`: values at the quantiles of a normal distribution, as weights have. `fp4`: 4-bit
    floats, worse on most models.
    """
    double_quantization: bool = True
    """Store the scales of the blocks in 8 bits too: 4.13 bits a weight instead of 4.5."""
    compute_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """The dtype that weights are multiplied in; null: that of the model. CPUs with AVX512-BF16
    multiply in bfloat16 whatever it says.
    """

    def layer_format(self, layer: Layer) -> FourBit:
        return FourBit(self.type, self.double_quantization, self.compute_dtype)

    def written_config(
        self, config: Mapping[str, Any], selection: Selection, formats: Mapping[str, LayerFormat]
    ) -> dict[str, Any]:
        written = super().written_config(config, selection, formats)
        if self.compute_dtype is None:
            written["quantization_config"]["bnb_4bit_compute_dtype"] = (
                config.get("dtype") or config.get("torch_dtype") or "float32"
            )
        return written

    def quantized_tensors(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        from bitsandbytes.functional import quantize_4bit

        codes, state = quantize_4bit(weight, quant_type=self.type, compress_statistics=self.double_quantization)
        # All layers share one table of values; a file holds it once for each.
        parts = {f"weight.{leaf}": tensor.clone() for leaf, tensor in state.as_dict(packed=True).items()}
        return {"weight": codes, **parts}
