"""What the stages that write a bitsandbytes checkpoint share (`nf4`, `int8`).
That is the work on a layer, what is refused, and what vLLM needs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from optkit.model.calibration_memory import Work
from optkit.model.linear_layers import EXPERTS, Layer, Selection
from optkit.model.shape import ModelShape
from optkit.model.task import WEIGHTS_ALONE, Task
from optkit.packed_tensors.base import LayerFormat
from optkit.source.quiet import only_errors_of
from optkit.stages.quantizing.fitting import refuse_layers
from optkit.stages.quantizing.job import QuantizationJob
from optkit.stages.quantizing.streaming import LayerQuantizer

if TYPE_CHECKING:
    from torch import Tensor


class BitsAndBytesQuantizer(LayerQuantizer):
    """Store weights as bitsandbytes does, which transformers opens with that package installed."""

    for_tasks: ClassVar[frozenset[Task]] = WEIGHTS_ALONE
    bytes_a_weight: ClassVar[int] = 16
    """What rounding a layer holds for each of its weights, as measured."""
    requires: ClassVar[tuple[str, ...]] = ("bitsandbytes>=0.50",)

    @abstractmethod
    def quantized_tensors(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a layer by their last name. weight: float [out, in], contiguous."""

    def check_layers(self, selection: Selection, formats: Mapping[str, LayerFormat]) -> None:
        refuse_layers(
            [name for name in selection.layers if EXPERTS in name],
            "belong to experts",
            where=self.kind,
            why="transformers holds the experts of a block in one tensor, and bitsandbytes knows Linear layers only",
            remedy=f"Set {self.kind}.exclude to ['*.experts.*'], or use the stage gptq",
        )

    def deployment_notes(self, selection: Selection, formats: Mapping[str, LayerFormat]) -> list[str]:
        return [
            "transformers needs bitsandbytes to open it; vLLM, since version 0.28, its plug-in: "
            "pip install vllm-bnb-plugin"
        ]

    @property
    def needs_no_text(self) -> bool:
        return True

    def rounded_layers(self, job: QuantizationJob, names: Sequence[str]) -> Mapping[str, Mapping[str, Tensor]]:
        only_errors_of("bitsandbytes")
        layers = {}
        for name in names:
            stored = job.read(job.weight(name)).to(job.context.device, non_blocking=True)
            weight = stored.T.contiguous() if job.selection.layers[name].transposed else stored
            layers[name] = self.quantized_tensors(name, weight)
        return layers

    def working_memory(self, shape: ModelShape, layers: Mapping[str, Layer], device: str) -> Work:
        return Work(self.bytes_a_weight * max(layer.outputs * layer.inputs for layer in layers.values()), streamed=True)
