"""Stage `fp8`: weights as 8-bit floats (E4M3), and activations rounded to them too.
GPUs since Ada multiply them at twice the speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from optkit.model.linear_layers import Selection
from optkit.model.task import EVERY_TASK, Task
from optkit.packed_tensors.base import LayerFormat
from optkit.packed_tensors.eight_bit import BLOCK, Number
from optkit.source.calibration import Calibration
from optkit.stages.quantizing.eight_bits import EightBitQuantizer
from optkit.stages.quantizing.fitting import refuse_odd_shapes
from optkit.stages.quantizing.job import BlockOutput, QuantizationJob

if TYPE_CHECKING:
    from torch import Tensor


class Fp8(EightBitQuantizer):
    """Store weights as 8-bit floats (E4M3, arXiv:2209.05433) and round activations to them.
    That is half the size of bfloat16, and no text is needed.
    """

    kind: ClassVar[str] = "fp8"
    example: ClassVar[str] = "- fp8: {scales: channel, activations: dynamic}"
    for_tasks: ClassVar[frozenset[Task]] = EVERY_TASK
    version: ClassVar[int] = 6
    number: ClassVar[Number] = "float"

    scales: Literal["channel", "tensor", "block"] = "channel"
    """What shares a scale: the weights of an output `channel`, the whole `tensor`, or a `block` of
    128 x 128 (DeepSeek-V3's way).
    """
    activations: Literal["dynamic", "static", "none"] = "dynamic"
    """`dynamic`: rounded with a scale for each token (for 128 inputs of it if `scales: block`),
    no calibration. `static`: with one scale for all tokens, calibrated; a little faster and a
    little worse. `none`: not rounded, weights alone are small."""
    rounding: Literal["nearest", "gptq"] = "nearest"
    """`nearest`: each weight to the nearest number, without looking at any text. `gptq`: it makes
    up for the errors of those rounded before it, on the calibration text (arXiv:2210.17323)."""
    calibration: Calibration | None = None
    """The text for `activations: static` and `rounding: gptq`; nothing else needs one."""

    @model_validator(mode="after")
    def _consistent(self) -> Fp8:
        reads = {"activations: static": self.activations == "static", "rounding: gptq": self.rounding == "gptq"}
        needed = next((field for field, is_set in reads.items() if is_set), None)
        if self.calibration and not needed:
            raise ValueError(
                "the calibration text would not be read: take it out, or set rounding: gptq, or activations: static"
            )
        if needed and not self.calibration:
            raise ValueError(f"{needed} needs a text: add calibration: {{dataset: c4}}, or take it out")
        if self.scales == "block" and self.activations == "static":
            raise ValueError(
                "vLLM has no static activations beside weights in blocks: set activations: dynamic, or scales: channel"
            )
        return self

    def check_layers(self, selection: Selection, formats: Mapping[str, LayerFormat]) -> None:
        super().check_layers(selection, formats)
        if self.scales == "block":
            refuse_odd_shapes(
                selection.layers.values(),
                BLOCK,
                "transformers and vLLM open whole blocks only",
                f"Set {self.kind}.scales to channel, or exclude the layers",
            )

    def quantized_blocks(self, job: QuantizationJob) -> Iterator[BlockOutput]:
        assert self.calibration is not None
        return self._calibrated_blocks(job, self.calibration)

    @property
    def needs_no_text(self) -> bool:
        return self.calibration is None

    def rounded_layers(self, job: QuantizationJob, names: Sequence[str]) -> Mapping[str, Mapping[str, Tensor]]:
        device = job.context.device
        weights = ((name, job.read(job.weight(name)).to(device, non_blocking=True).float()) for name in names)
        return {name: self._rounded(job, name, weight, None) for name, weight in weights}
