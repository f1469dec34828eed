"""An exporter (ONNX Runtime GenAI's model builder, torch) in a process of its own: what it is asked
for, and how it can end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from optkit import errors
from optkit.errors import OptkitError, ResourceError, StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.writer import write_config
from optkit.processes.crashes import with_trace
from optkit.processes.start import end_group, python_command, python_environment, start
from optkit.progress import Task

WORKER = "optkit.onnx.build_worker"
WHERE = "onnx"
END_S = 60.0
"""How long a process that has said its last word may take to end."""
NAMES = {"genai": "ONNX Runtime GenAI's model builder", "torch": "torch.onnx.export"}
"""The exporters, as a sentence calls them."""
PRECISIONS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Dtypes as the builder calls them."""
ARCHITECTURES = (
    "Ernie4_5ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "GraniteForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "Lfm2ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "NemotronForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
)
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
    """The embedding reads the codes of lm_head; only where both are one matrix and `head_bits` are
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

    The process ends with this one, however that ends, and what it prints is shown only where it
    fails. Raises StageError with what the exporter says, ResourceError where memory or disk run
    out.
    """
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=order.target.parent) as made:
        work = Path(made)
        log = work / "log"
        request = _request(order, work)
        with _started(request, log) as (process, messages):
            last = _listen(messages, task)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        if last.get("type") != "done":
            raise _failure(last, process.returncode, log, order)
    return {}


def _request(order: Order, work: Path) -> dict[str, Any]:
    """Return what the worker reads; `view` shows the builder a config without the quantization that
    it would look for.
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
    config = Checkpoint(order.source).config
    write_config(view, {name: value for name, value in config.items() if name != "quantization_config"})
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


@contextlib.contextmanager
def _started(request: dict[str, Any], log: Path) -> Iterator[tuple[subprocess.Popen[bytes], IO[str]]]:
    """Run the worker on a request; it and what it started end with this context."""
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8") as messages, log.open("wb") as output:  # noqa: PTH123
        process = start(
            python_command("-m", WORKER, str(writing)),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(writing,),
            env=_variables(),
        )
        try:
            os.close(writing)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            yield process, messages
        finally:
            end_group(process)


def _variables() -> dict[str, str]:
    """Return the worker's environment: our own paths, no network, no GPU."""
    return python_environment(
        PYTHONUNBUFFERED="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES=""
    )


def _listen(messages: IO[str], task: Task) -> dict[str, Any]:
    """Pass on what the worker says, and return its last message; empty where it ends without one."""
    for line in messages:
        message: dict[str, Any] = json.loads(line)
        if message["type"] != "read":
            return message
        task.advance(1 if str(message["what"]).startswith("layer") else 0, note=message["what"])
    return {}


def _failure(last: dict[str, Any], status: int, log: Path, order: Order) -> OptkitError:
    where = f"{WHERE}: exporter {order.exporter}"
    if last.get("type") == "refused":
        kind: type[OptkitError] = getattr(errors, last["kind"], StageError)
        return kind(last["what"], where=last["where"], why=last["why"], remedy=last["remedy"])
    if last.get("disk_full"):
        return ResourceError(
            "the disk is full", where=str(order.target), remedy="Free some space, or put the store on another disk"
        )
    if last.get("no_memory") or status == -signal.SIGKILL:
        how = "" if last else "Its process was ended by SIGKILL, as the system does where memory runs out"
        return ResourceError(
            "memory ran out while the model was exported", where=WHERE, why=how, remedy="Use a machine with more memory"
        )
    if last:
        failed = StageError(
            f"{last['exception']}: {last['message']}", where=where, why=f"{NAMES[order.exporter]} stopped there"
        )
        return with_trace(failed, last, "the process that exported")
    return StageError(f"its process {_ending(status)} and without a result", where=where, why=_last_lines(log))


def _ending(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _last_lines(log: Path, count: int = 3) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"Its last words: {' / '.join(lines[-count:])}" if lines else "It said nothing"
