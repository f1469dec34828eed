"""Setting `cuda_graphs`: the decode step as one CUDA graph of optkit's own kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from optkit.errors import StageError
from optkit.kernels.cuda.families import REMEDY, why_not_family
from optkit.model.shape import ModelShape
from optkit.settings.compile import Compile
from optkit.settings.kv_cache import KvCache
from optkit.settings.speculative import Speculative
from optkit.stage import Format, Setting


class CudaGraphs(Setting):
    """Decode by one CUDA graph a token, five kernels a layer.
    It takes models of the Llama family in bfloat16 or float16, in 4 bits or not.

    Up to 256 sequences at once; prompts, and larger batches, run through the model itself. On the
    CPU nothing changes.
    """

    kind: ClassVar[str] = "cuda_graphs"
    example: ClassVar[str] = (
        "- gptq: {bits: 4, group_size: 32, symmetric: false}\n- precision: bf16\n- attention: sdpa\n- cuda_graphs"
    )
    accepts: ClassVar[frozenset[Format]] = frozenset({Format.CHECKPOINT, Format.QUANTIZED})

    def check(self, shape: ModelShape, device: str, directory: Path | None = None) -> None:
        """Raise StageError for a model whose step the graph does not know."""
        if self.applies(device) and (reason := why_not_family(shape.config)):
            raise StageError(
                "the decode step of this model cannot be one graph", where="cuda_graphs", why=reason, remedy=REMEDY
            )

    def excludes(self, other: Setting, device: str) -> str:
        """Return why the graph cannot be used beside another setting.
        On the CPU, where it is off, such a recipe is refused too.
        """
        if isinstance(other, Speculative | KvCache) or (isinstance(other, Compile) and other.applies("cuda")):
            return "Each of them decides how a token is decoded"
        if other.changes_products():
            return (
                "The graph's kernels compute in the model's own bfloat16 or float16, and what the "
                "other asks for would be left out"
            )
        return ""

    def applies(self, device: str) -> bool:
        """Say whether decoding changes on a device."""
        return device.startswith("cuda")

    def on_open(self, session: Any) -> Any:
        """Return the session, its decode steps one graph each.

        Raises StageError for another step than the graph's, or if something else decides how the
        model decodes.
        """
        if not self.applies(session.device):
            return session
        from optkit.kernels.cuda.decoding import GraphDecoder

        if session.codes_cache:
            raise StageError(
                "the checkpoint has scales for a KV cache of codes, and cuda_graphs keeps floats",
                where="cuda_graphs",
                why="Each of them decides how a token is decoded",
                remedy="Take cuda_graphs or kv_scales out of the recipe",
            )
        session.decode_with(GraphDecoder(session.model))
        return session

    def step_mode(self, device: str) -> str:
        """Return `cuda_graphs` on GPUs."""
        return self.kind if self.applies(device) else ""
