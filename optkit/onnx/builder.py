"""An exporter (ONNX Runtime GenAI's model builder, torch) in a process of its own.
This is what it is asked for, and how it can end.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optkit.common.out_of_resources import NO_ROOM, errno_of, is_out_of_memory, more_room
from optkit.environment import offline_on
from optkit.errors import OptkitError, ResourceError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.writer import write_config
from optkit.processes.child import Child
from optkit.processes.commands import python_environment
from optkit.processes.crashes import ChildEndedError, ChildError
from optkit.progress import Task

WORKER = "optkit.onnx.build_worker"
WHERE = "onnx"
NAMES = {"genai": "ONNX Runtime GenAI's model builder", "torch": "torch.onnx.export"}
"""The exporters, as a sentence calls them."""
SHORT_LENGTH = "original_max_position_embeddings"
"""Key of Phi-3's config.json: where another length stands in it, positions are scaled by LongRoPE."""
PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Dtypes as the builder calls them."""
ARCHITECTURES = (
    "Ernie4_5ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GemmaForCausalLM", "GraniteForCausalLM",
    "HunYuanDenseV1ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "NemotronForCausalLM",
    "Phi3ForCausalLM", "PhiForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM",
)  # fmt: skip
"""The causal language models that the builder knows and optkit hands it."""


@dataclass(frozen=True)
class Order:
    """What an exporter is asked for."""

    source: Path
    """A checkpoint, float or quantized."""
    target: Path
    """An empty directory, for model.onnx, its data and genai_config.json."""
    provider: str
    """cpu, cuda, dml or webgpu."""
    dtype: str
    """In which the graph computes, e.g. `float32`."""
    head_bits: int | None = None
    """Bits that lm_head is rounded to; None leaves it as it is."""
    shared_embedding: bool = False
    """The embedding reads the codes of lm_head; only if both are one matrix and `head_bits` are
    given.
    """
    float_activations: bool = True
    """MatMulNBits multiplies in the dtype of the graph; False: it may round its inputs to 8 bits
    (accuracy level 4).
    """
    trust_remote_code: bool = False
    device: str = "cpu"
    """Where the graph is compared with its source."""
    exporter: str = "genai"
    """genai, torch or optimum."""
    opset: int | None = None
    """Version of ONNX's operators; None is the exporter's own choice."""
    kv_cache: bool = True
    """Keys and values go in and come out."""


def refuse_architecture(architecture: str) -> None:
    """Raise StageError for a model that the builder does not know."""
    if architecture not in ARCHITECTURES:
        raise StageError(
            f"the exporter genai does not know {architecture or 'a model without `architectures`'}",
            where=WHERE,
            why=f"It knows {', '.join(ARCHITECTURES)}",
            remedy="Take exporter: torch, or leave the exporter out",
        )


def build(order: Order, task: Task) -> dict[str, Any]:
    """Fill the target; return what a report says of it beside the graph: nothing.

    The process ends with this one, however that ends, and what it prints is shown only if it
    fails. Raises StageError with what the exporter says, ResourceError if memory or disk run
    out.
    """
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=order.target.parent) as made:
        work = Path(made)
        request = _request(order, work)
        env = python_environment(PYTHONUNBUFFERED="1", **offline_on("cpu"))
        with Child(WORKER, name="the process that exported", log=work / "log", env=env) as child:
            child.send(request)
            try:
                child.result(others={"read": lambda part: task.advance(int(part.startswith("layer")), note=part)})
            except ChildError as error:
                raise _failure(error, order) from error
    return {}


def _request(order: Order, work: Path) -> dict[str, Any]:
    """Return what the worker reads.
    `view` shows the builder a config of its own.
    """
    asked = {
        "exporter": order.exporter,
        "source": str(order.source.absolute()),
        "target": str(order.target.absolute()),
        "trust_remote_code": order.trust_remote_code,
    }
    if order.exporter == "torch":
        return {**asked, "opset": order.opset, "kv_cache": order.kv_cache}
    view = work / "view"
    view.mkdir()
    write_config(view, _shown(Checkpoint(order.source).config))
    for each in [*order.source.glob("generation_config.json"), *order.source.glob("*.py")]:
        (view / each.name).symlink_to(each.absolute())
    # Its graph of float16 for the CPU lacks the fused attention that the CPU has: it is asked for
    # that of CUDA instead.
    provider = "cuda" if (order.provider, order.dtype) == ("cpu", "float16") else order.provider
    options: dict[str, Any] = {"int4_accuracy_level": 0 if order.float_activations else 4}
    if order.head_bits is not None:
        options["shared_embeddings"] = False
    if (provider, order.dtype) == ("webgpu", "float32"):
        options["use_webgpu_fp32"] = True
    return {
        **asked,
        "view": str(view.absolute()),
        "cache": str((work / "cache").absolute()),
        "precision": PRECISIONS[order.dtype],
        "provider": provider,
        "head_bits": order.head_bits,
        "shared_embedding": order.shared_embedding,
        "options": options,
    }


def _shown(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the quantization that the builder would look for.
    Two lengths of sequences are for LongRoPE alone: without it, it looks for its factors in vain.
    """
    shown = {name: value for name, value in config.items() if name != "quantization_config"}
    rope = shown.get("rope_parameters") or shown.get("rope_scaling") or {}
    if "long_factor" not in rope and SHORT_LENGTH in shown:
        shown[SHORT_LENGTH] = shown["max_position_embeddings"]
    return shown


def _failure(error: ChildError, order: Order) -> OptkitError:
    where = f"{WHERE}: exporter {order.exporter}"
    if (number := errno_of(error)) in NO_ROOM:
        return ResourceError(NO_ROOM[number], where=str(order.target), remedy=more_room(number))
    if is_out_of_memory(error):
        how = f"Its process {error.how}" if isinstance(error, ChildEndedError) else ""
        return ResourceError(
            "memory ran out while the model was exported", where=WHERE, why=how, remedy="Use a machine with more memory"
        )
    if isinstance(error, ChildEndedError):
        return StageError(f"its process {error.how} and without a result", where=where, why=error.last_words)
    return StageError(error.first_words, where=where, why=f"{NAMES[order.exporter]} stopped there")
