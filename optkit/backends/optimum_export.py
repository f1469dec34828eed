"""Decoders as ONNX by optimum-onnx, in its environment.
It is told what its transformers misreads, and held against ours before and after.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optkit.backends.environments import Environment, Environments
from optkit.backends.older_transformers import PROBE_TOKENS, check_same_model, hand_over, logits_here
from optkit.backends.process import run_worker, work_directory
from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.onnx.builder import Order
from optkit.onnx.model_file import ModelFile, ModelWriter
from optkit.progress import Progress

LIBRARY = "optimum"
WHERE = "onnx: exporter optimum"
TASKS = {True: "text-generation-with-past", False: "text-generation"}
"""With a KV cache, without -> as optimum calls it."""


def export_with_optimum(order: Order, progress: Progress) -> dict[str, Any]:
    """Fill the target with model.onnx and its data.
    Returns versions, and how far apart both transformers read the source.

    Raises StageError if the environment is not built, with optimum's exception, and if its
    transformers reads another model.
    """
    environments = Environments()
    if environments.find(LIBRARY) is None:
        why, remedy = "optimum-onnx needs a transformers older than 4.58", f"Run: optkit env build {LIBRARY}"
        raise StageError("the environment of optimum is not built", where=WHERE, why=why, remedy=remedy)
    apart: list[float] = []
    with environments.using(LIBRARY, progress) as environment, work_directory(order.target) as work:
        request = _request(order, environment, work)
        here = logits_here(order.source, request["probe"], order.dtype)

        def check(file: Path) -> None:
            from safetensors.torch import load_file

            version, there = environment.told_versions["transformers"], load_file(file)["logits"]
            instead = "Take exporter: torch for this model"
            apart.append(check_same_model(here, there, order.dtype, LIBRARY, version, instead))

        run_worker(environment, request, progress, environments.log(LIBRARY), check)
        ModelWriter(ModelFile(Path(request["target"])), order.target).finish()
    return {"versions": environment.told_versions, "sources_apart": apart[0]}


def _request(order: Order, environment: Environment, work: Path) -> dict[str, Any]:
    """Return what the worker is told; see `optkit.backends.workers.launch.Job`."""
    checkpoint = Checkpoint(order.source)
    written = work / "written"
    written.mkdir()
    length = min(PROBE_TOKENS, checkpoint.shape.positions or PROBE_TOKENS)
    return {
        "method": "export",
        "source": str(hand_over(order.source, work / "source", environment.told_versions["transformers"])),
        "target": str(written),
        "layers": {},
        "kept": [],
        "quantization": {},
        "blocks": 0,
        "fields": {"task": TASKS[order.kv_cache], "opset": order.opset},
        "device": "cpu",
        "dtype": order.dtype,
        "seed": 0,
        "windows": [],
        "probe": [index % int(checkpoint.config["vocab_size"]) for index in range(length)],
    }
