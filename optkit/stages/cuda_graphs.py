"""Setting `cuda_graphs`: the decode step as one CUDA graph of optkit's own kernels."""

from __future__ import annotations

from pathlib import Path

from optkit.errors import StageError
from optkit.kernels.cuda.families import why_not_family
from optkit.model.shape import ModelShape
from optkit.stage import Setting

REMEDY = "Take cuda_graphs out of the recipe, or use compile"


class CudaGraphs(Setting):
    """Decode by one CUDA graph a token, five kernels a layer: models of the Llama family in bfloat16 or float16, in 4 bits or not.

    Up to 32 sequences at once; prompts, and larger batches, run through the model itself. On the CPU nothing changes.
    """

    def check(self, shape: ModelShape, device: str, directory: Path | None = None) -> None:
        """Raise StageError for a model whose step the graph does not know."""
        if self.applies(device) and (reason := why_not_family(shape.config)):
            raise StageError("the decode step of this model cannot be one graph", where="cuda_graphs", why=reason, remedy=REMEDY)

    def applies(self, device: str) -> bool:
        """Say whether decoding changes on a device."""
        return device.startswith("cuda")

    def describe(self, device: str) -> str:
        """Return `cuda_graphs: on`, or that it is off."""
        return f"cuda_graphs: {'on' if self.applies(device) else f'off on {device}'}"
