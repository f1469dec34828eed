"""Which exporter makes the fastest graph known to be equal, and which models have an encoder.
No torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from optkit.errors import StageError
from optkit.model.task import ENCODER_DECODERS, ENCODING, HEADS, Task, architecture_of, task_of
from optkit.onnx.builder import ARCHITECTURES

OPSET = 21
"""Version of ONNX's operators that is written by default."""
OPSETS = {"torch": range(18, 24), "optimum": range(14, 21)}
"""Exporter -> those that it can write and ONNX Runtime reads."""
WITHOUT_CACHE = "Set kv_cache: false, and the graph computes whole sequences"

ROUTED = "Its decoder needs to know which experts the encoder took"
UNTRACED = {
    "fsmt": "Its decoder has no mask that a cache of another length fits",
    "led": "How its text is cut into windows hangs on the length of the text",
    "nllb-moe": ROUTED,
    "prophetnet": "It predicts several tokens at once, and what a graph keeps of a token is one of them",
    "switch_transformers": ROUTED,
}
"""`model_type` of encoder-decoders that torch does not export here, and why."""


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
