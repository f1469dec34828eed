"""Stage `rtn`: round every weight to the nearest point of its group's grid.
No calibration, seconds of work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from optkit.model.calibration_memory import Work
from optkit.model.linear_layers import Layer
from optkit.model.shape import ModelShape
from optkit.model.task import EVERY_TASK, Task
from optkit.stages.quantizing.backend_field import OWN, Backed
from optkit.stages.quantizing.integers import packed_grid
from optkit.stages.quantizing.job import QuantizationJob

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.algorithms.grid import QuantizedWeight

WORK_BYTES = 9.1
"""What rounding holds for each weight of a layer, as floats and codes."""


class Rtn(Backed):
    """Round each weight to the nearest point of its group's grid (RTN).
    It needs no calibration text, and seconds instead of minutes.
    """

    kind: ClassVar[str] = "rtn"
    example: ClassVar[str] = "- rtn: {bits: 4, group_size: 32, symmetric: false}"
    for_tasks: ClassVar[frozenset[Task]] = EVERY_TASK

    scale_search: Literal["minmax", "mse"] = "minmax"
    """`minmax`: the scale that reaches every weight. `mse`: the one with the least squared rounding
    error, which cuts outliers.
    """
    backend: Literal["optkit", "llmcompressor", "torchao"] = "optkit"
    """Who does the work: optkit, or another library in an environment of its own (`optkit env`)."""

    @property
    def grid(self) -> Mapping[str, Any]:
        return {**super().grid, "rounding": "nearest"}

    @property
    def needs_no_text(self) -> bool:
        return self.backend == OWN

    def rounded_layers(self, job: QuantizationJob, names: Sequence[str]) -> Mapping[str, Mapping[str, Tensor]]:
        return self._packed(job, {name: self.rounded(job, name) for name in names})

    def rounded(self, job: QuantizationJob, name: str) -> QuantizedWeight:
        """Return the weight of a layer on its grid; raises SourceError for weights that are NaN or Inf."""
        from optkit.algorithms.grid import minmax_scales, round_to_nearest
        from optkit.algorithms.scale_search import search_scales

        stored = job.read(job.weight(name)).to(job.context.device, non_blocking=True).float()
        weight = stored.T.contiguous() if job.selection.layers[name].transposed else stored
        grid = packed_grid(job, name)
        scales, zeros = minmax_scales(weight, grid) if self.scale_search == "minmax" else search_scales(weight, grid)
        return round_to_nearest(weight, scales, zeros, grid)

    def working_memory(self, shape: ModelShape, layers: Mapping[str, Layer], device: str) -> Work:
        largest = max(layer.outputs * layer.inputs for layer in layers.values())
        return Work(int(WORK_BYTES * largest), streamed=True)
