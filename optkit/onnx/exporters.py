"""Which exporter makes the fastest graph known to be equal, and which models have an encoder.
No torch is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from optkit.errors import StageError
from optkit.model.attention import refuse_other_states
from optkit.model.state_kernels import code_of
from optkit.model.task import ENCODER_DECODERS, ENCODING, HEADS, Task, architecture_of, task_of
from optkit.model.text_config import text_type
from optkit.onnx.builder import ARCHITECTURES

OPSET = 21
"""Version of ONNX's operators that is written by default."""
OPSETS = {"torch": range(18, 24), "optimum": range(14, 21)}
"""Exporter -> those that it can write and ONNX Runtime reads."""
WITHOUT_CACHE = "Set kv_cache: false, and the graph computes whole sequences"

UNSIZED = "Its config.json has no hidden_size of both halves, which the export reads"
ROUTED = "Its decoder needs to know which experts the encoder took"
UNTRACED = {
    "fsmt": "Its decoder has no mask that a cache of another length fits",
    "led": "How its text is cut into windows hangs on the length of the text",
    "nllb-moe": ROUTED,
    "prophetnet": "It predicts several tokens at once, and what a graph keeps of a token is one of them",
    "switch_transformers": ROUTED,
    "t5gemma": UNSIZED,
    "t5gemma2": UNSIZED,
}
"""`model_type` of encoder-decoders that torch does not export here, and why."""
COUNTED = frozenset({"aria_text", "doge", "mpt", "xglm"})
"""`model_type` of decoders whose code branches on how many tokens a cache has, or on numbers beside it."""
WITHOUT_OPERATOR = {r"torch\.polar\(|view_as_complex": "complex numbers", r"\.icdf\(|erfinv": "quantiles"}
"""In transformers' code of a decoder -> what ONNX has no operator for."""


def refuse_untraced(config: Mapping[str, Any], kv_cache: bool) -> None:
    """Raise StageError for a decoder that torch does not export here, with or without its KV cache."""
    kind, architecture = text_type(config), architecture_of(config)
    for part, what in WITHOUT_OPERATOR.items():
        if re.search(part, code_of(kind)):
            raise StageError(
                f"{architecture} cannot be written as a graph",
                where="onnx",
                why=f"Its code computes with {what}, which ONNX has no operator for",
                remedy="Leave onnx out for this architecture",
            )
    if not kv_cache:
        return
    refuse_other_states(config, "onnx.kv_cache", "These alone can be inputs and outputs of the graph", WITHOUT_CACHE)
    if kind in COUNTED:
        raise StageError(
            f"{architecture} cannot be written as a graph with a KV cache",
            where="onnx.kv_cache",
            why="Its code branches on numbers that are known when it runs",
            remedy=WITHOUT_CACHE,
        )


def exporter_for(config: Mapping[str, Any]) -> Literal["genai", "torch"]:
    """Return `genai` for decoders whose attention it fuses; `torch` for all other models."""
    return "genai" if architecture_of(config) in ARCHITECTURES else "torch"


def traced_task(config: Mapping[str, Any]) -> Task:
    """Return what a model is for that has an encoder. Raises StageError for what is none."""
    task = task_of(config)
    if (why := UNTRACED.get(str(config.get("model_type")))) and task in ENCODER_DECODERS:
        raise StageError(
            f"{architecture_of(config)} cannot be written as graphs of its encoder and decoder",
            where="onnx",
            why=why,
            remedy="Leave onnx out for this architecture",
        )
    if task in ENCODING | ENCODER_DECODERS:
        return task
    raise StageError(
        f"{architecture_of(config) or config.get('model_type')} is no encoder that torch exports here",
        where="onnx",
        why=f"Those of BERT and its kin end with {', '.join(('Model', *HEADS))}",
        remedy="It is a causal language model: take exporter: genai"
        if task is Task.GENERATION
        else "Export another model",
    )
