"""Round layers to 4-bit floats, to nearest or so that they make up for each other's errors (`mx`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from optkit.algorithms.few_tokens import FEW_TOKENS
from optkit.common.out_of_resources import out_of_memory
from optkit.errors import StageError
from optkit.stages.quantizing.job import QuantizationJob

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.algorithms.microscaling import MicroscaledWeight
    from optkit.stages.quantizing.input_ranges import InputRange


@dataclass(frozen=True)
class FloatRounding:
    """How a stage rounds layers."""

    job: QuantizationJob
    kind: str
    """Of the stage."""
    shares_scales: bool
    """The layers of a module share a global scale: NVFP4, and not MXFP4."""
    search: bool
    compensates: bool
    scales_inputs: bool
    """Layers keep a global scale of their inputs."""

    def module(self, names: Sequence[str], seen: Mapping[str, InputRange]) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the tensors of the layers of a module. `seen`: of their inputs, if anything was."""
        from optkit.algorithms.microscaling import (
            exact_nvfp4_scale,
            nvfp4_global_scale,
            pack,
            quantize_mxfp4,
            quantize_nvfp4,
        )

        job, device = self.job, self.job.context.device
        job.task.advance(0, note=names[0])
        with out_of_memory(names[0], device, "Use a machine with more memory"):
            weights = {name: job.read(f"{name}.weight").to(device, non_blocking=True) for name in names}
            quantize = partial(quantize_mxfp4, search=self.search)
            if self.shares_scales:
                exact = exact_nvfp4_scale(weights.values())
                if exact is not None:
                    job.details["layers_without_error"] = job.details.get("layers_without_error", 0) + len(names)
                shared = nvfp4_global_scale(weights.values()) if exact is None else exact
                quantize = partial(quantize_nvfp4, global_scale=shared, search=self.search or exact is not None)
            return {
                name: pack(self.layer(name, weight, quantize, seen.get(name)))
                | self._scale_of_inputs(name, seen.get(name))
                for name, weight in weights.items()
            }

    def _scale_of_inputs(self, name: str, seen: InputRange | None) -> dict[str, Tensor]:
        """Return the global scale of a layer's inputs if its format has one."""
        from optkit.algorithms.microscaling import nvfp4_global_scale
        from optkit.stages.quantizing.hessians import refuse_infinite

        if not self.scales_inputs:
            return {}
        if seen is None or not seen.tokens:
            raise StageError(
                "no token of the calibration text reached the layer",
                where=name,
                remedy=f"Exclude it, or set {self.kind}.activations to none",
            )
        refuse_infinite(seen.amax, name, self.job.skeleton)
        return {"input_global_scale": nvfp4_global_scale([seen.amax])}

    def layer(
        self, name: str, weight: Tensor, quantize: Callable[..., MicroscaledWeight], seen: InputRange | None
    ) -> MicroscaledWeight:
        """Return a weight in 4 bits.
        One that saw too few tokens to be compensated on is rounded to nearest, and reported.
        """
        from optkit.algorithms.microscaling import compensated
        from optkit.stages.quantizing.hessians import refuse_infinite

        tokens = seen.tokens if seen else 0
        matrix = seen.hessian() if seen and tokens >= FEW_TOKENS else None
        if matrix is None:
            if self.compensates:
                self.job.details.setdefault("rounded_to_nearest", {})[name] = tokens
            return quantize(weight)
        refuse_infinite(matrix, name, self.job.skeleton)
        try:
            return compensated(weight.float(), quantize(weight, importance=matrix.diagonal()), matrix)
        except ValueError as error:
            remedy = f"Set {self.kind}.rounding to nearest, or calibrate on more text"
            raise StageError(str(error), where=name, remedy=remedy) from error
