"""Setting `cuda_graphs`: the decode step as one CUDA graph of optkit's own kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from optkit.errors import MissingPackageError, StageError
from optkit.model.attention import refuse_without_steps
from optkit.model.shape import ModelShape
from optkit.progress import ToActOn
from optkit.settings.compile import Compile
from optkit.settings.kv_cache import KvCache
from optkit.settings.speculative import Speculative
from optkit.stage import Format, Setting

FALLBACK: Literal["reduce-overhead"] = "reduce-overhead"
"""Mode of `compile` for a model that the graph does not know."""


class CudaGraphs(Setting):
    """Decode by one CUDA graph a token, five kernels a layer.
    It takes decoders of RMS norms, rotary embeddings and grouped heads in bfloat16 or float16, with
    weights in 4, 8 or 16 bits. What a layer is made of is read from the model's modules.

    Beside `tensor_parallel` each GPU has a graph of its share, of whole heads and columns.

    At opening its logits are compared with the model's own. A model that it does not know is
    compiled in its place (`compile: reduce-overhead`), and a note says why. That needs triton and a
    C compiler. Up to 256 sequences at once; larger batches run through the model itself. On the CPU
    nothing changes.
    """

    kind: ClassVar[str] = "cuda_graphs"
    example: ClassVar[str] = (
        "- gptq: {bits: 4, group_size: 32, symmetric: false}\n- precision: bf16\n- attention: sdpa\n- cuda_graphs"
    )
    accepts: ClassVar[frozenset[Format]] = frozenset({Format.CHECKPOINT, Format.QUANTIZED})

    def check(self, shape: ModelShape, device: str, directory: Path | None = None) -> None:
        """Raise StageError for a model without a decode step."""
        refuse_without_steps(shape.config, self.kind)

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
        return device.startswith("cuda")

    def on_load(self, model: Any, device: str) -> Any:
        """Return the model with its decoder, or with a note that says what decodes in its place."""
        if not self.applies(device):
            return model
        from optkit.kernels.cuda.decoding import GraphDecoder

        try:
            model.graph_decoder = GraphDecoder(model)
        except StageError as reason:
            model.graph_decoder = f"{self.kind}: compile: {FALLBACK} in its place, because {reason.why}"
            try:
                Compile(mode=FALLBACK).on_load(model, device)
            except (StageError, MissingPackageError) as error:
                model.graph_decoder = ToActOn(f"{self.kind}: off, because {reason.why}. Nor is it compiled: {error}")
        return model

    def on_open(self, session: Any) -> Any:
        """Return the session, its decode steps one graph each.

        Raises StageError if something else decides how the model decodes.
        """
        if not self.applies(session.device):
            return session
        from torch.nn import Module

        if session.codes_cache:
            raise StageError(
                "the checkpoint has scales for a KV cache of codes, and cuda_graphs keeps floats",
                where="cuda_graphs",
                why="Each of them decides how a token is decoded",
                remedy="Take cuda_graphs or kv_scales out of the recipe",
            )
        decoder = vars(session.model).pop("graph_decoder")  # which has the model
        if isinstance(decoder, str):
            session.add_note(decoder)
        else:
            session.decode_with(decoder)
            slower = {type(layer.mlp).__name__ for layer in decoder.layers if isinstance(layer.mlp, Module)}
            if slower:
                session.add_note(
                    f"{self.kind}: no kernel of optkit computes what {', '.join(sorted(slower))} computes. "
                    "The model's own code does, which is slower"
                )
        return session

    def step_mode(self, device: str) -> str:
        return self.kind if self.applies(device) else ""
