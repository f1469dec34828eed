"""Worker of llm-compressor 0.14: GPTQ, AWQ and rounding to nearest."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.core import LifecycleCallbacks
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

if TYPE_CHECKING:
    from optkit.backends.workers.launch import Job


def quantize(job: Job) -> dict[str, Any]:
    """Quantize and save; returns nothing of note."""
    named: dict[str, list[str]] = {}
    for name, scheme in job.layers.items():
        named.setdefault(json.dumps(scheme, sort_keys=True), []).append(name)
    usual = max(named, key=lambda scheme: len(named[scheme]))
    groups = [
        {"weights": _weights(json.loads(scheme)), "targets": ["Linear"] if scheme == usual else names}
        for scheme, names in named.items()
    ]
    chosen = {"config_groups": {f"group_{index}": group for index, group in enumerate(groups)}, "ignore": job.kept}
    modifiers: list[Any]
    if job.method == "gptq":
        order = "static" if job.fields["activation_order"] else None
        modifiers = [GPTQModifier(**chosen, dampening_frac=job.fields["damping"], actorder=order)]
    elif job.method == "awq":
        from llmcompressor.modifiers.transform.awq import AWQModifier

        modifiers = [AWQModifier(n_grid=job.fields["grid_points"]), QuantizationModifier(**chosen)]
    else:
        modifiers = [QuantizationModifier(**chosen)]
    options: dict[str, Any] = {}
    if job.windows:
        _count_blocks(job)
        rows = [{"input_ids": window, "attention_mask": [1] * len(window)} for window in job.windows]
        options = {
            "dataset": Dataset.from_list(rows),
            "max_seq_length": len(job.windows[0]),
            "num_calibration_samples": len(rows),
            "shuffle_calibration_samples": False,
            "batch_size": job.fields["batch_size"],
        }
    model = job.load_model().to(job.device)
    oneshot(model=model, recipe=modifiers, output_dir=str(job.target), **options)
    return {}


def _weights(scheme: dict[str, Any]) -> dict[str, Any]:
    grouped = scheme["group_size"] > 0
    return {
        "num_bits": scheme["bits"],
        "type": "int",
        "symmetric": scheme["symmetric"],
        "strategy": "group" if grouped else "channel",
        "group_size": scheme["group_size"] if grouped else None,
    }


def _count_blocks(job: Job) -> None:
    """Move the bar at the end of each of its sequential epochs.
    There is one for each block, and one for what comes after them.
    """
    end = LifecycleCallbacks.sequential_epoch_end
    count = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        left = end(*arguments, **options)
        count += 1
        if count <= job.blocks:
            job.advance(f"block {count - 1}")
        return left

    LifecycleCallbacks.sequential_epoch_end = counted
    job.start(f"llmcompressor {job.method}", job.blocks, "blocks")
