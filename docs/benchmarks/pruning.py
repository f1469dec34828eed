"""Pruning by optkit and by llm-compressor on the same tokens, and what `prune_structured` leaves: perplexity,
zeros, parameters, bytes of the KV cache and seconds, as a Markdown table.

    python docs/benchmarks/pruning.py DATA MODEL... [--only PATTERN] [--store DIR] [--device DEVICE] \
        [--samples N] [--time] [--llmcompressor PYTHON]

DATA holds `wikitext2_raw/` and `c4_sample/`. Calibrated on 64 x 512 tokens of C4 (N x 512), where whole
parts go on 32 x 512; perplexity on the first 15 windows of 2048 tokens of WikiText-2's test split,
through optkit's session; `--time` leaves it out. Seconds are those of the pruning: loading,
calibrating, pruning, saving. PYTHON is the interpreter of an environment with llm-compressor
(`optkit env build llmcompressor` makes one); without it its rows are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import types
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

CALIBRATION: dict[str, Any] = {"dataset": "c4", "samples": 64, "sequence_length": 512}
WINDOWS = {"dataset": "wikitext2", "split": "test", "window": 2048, "windows": 15}
HALF: dict[str, Any] = {"sparsity": 0.5}
TEXT = {"calibration": CALIBRATION}
PAPER = {"method": "sparsegpt", "refinements": 0, "equal_tokens": False, **TEXT}
FEWER: dict[str, Any] = {"calibration": {**CALIBRATION, "samples": 32}}
FIFTH, LOSS = {"remove_layers": 0.2, **FEWER}, {"layer_importance": "perplexity"}
OURS: dict[str, dict[str, Any] | None] = {
    "unmodified": None,
    "magnitude, 50%": {"method": "magnitude", **HALF},
    "Wanda, 50%": {"method": "wanda", **HALF, **TEXT},
    "SparseGPT as in its paper, 50%": {**PAPER, **HALF},
    "SparseGPT, 50%": {**HALF, **TEXT},
    "Wanda, 50%, OWL": {"method": "wanda", "allocation": "owl", **HALF, **TEXT},
    "Wanda, 50%, by sensitivity": {"method": "wanda", "allocation": "sensitivity", **HALF, **TEXT},
    "SparseGPT, 50%, OWL": {"allocation": "owl", **HALF, **TEXT},
    "SparseGPT, 50%, by sensitivity": {"allocation": "sensitivity", **HALF, **TEXT},
    "magnitude, 2:4": {"method": "magnitude", "pattern": "2:4"},
    "Wanda, 2:4": {"method": "wanda", "pattern": "2:4", **TEXT},
    "SparseGPT as in its paper, 2:4": {**PAPER, "pattern": "2:4"},
    "SparseGPT, 2:4": {"pattern": "2:4", **TEXT},
    "SparseGPT, 4:8": {"pattern": "4:8", **TEXT},
}
STRUCTURED: dict[str, dict[str, Any]] = {
    "20% of the blocks, block influence": FIFTH,
    "20% of the blocks, block influence, one by one": {**FIFTH, "layer_search": "one_by_one"},
    "20% of the blocks, block influence, contiguous": {**FIFTH, "layer_search": "contiguous"},
    "20% of the blocks, perplexity": {**FIFTH, **LOSS},
    "20% of the blocks, perplexity, one by one": {**FIFTH, "layer_search": "one_by_one", **LOSS},
    "20% of the blocks, perplexity, contiguous": {**FIFTH, "layer_search": "contiguous", **LOSS},
    "25% of the feed-forward channels": {"intermediate_size": 0.75, **FEWER},
    "25% of the feed-forward channels, not compensated": {"intermediate_size": 0.75, "compensate": False, **FEWER},
    "a third of the heads": {"attention_heads": 6, **FEWER},
    "a third of the heads, not compensated": {"attention_heads": 6, "compensate": False, **FEWER},
    "3 -> 1 heads of keys and values, pooled": {"kv_heads": 1, **FEWER},
    "3 -> 1 heads of keys and values, by importance": {"kv_heads": 1, "kv_method": "importance", **FEWER},
    "a third of the hidden size, and of the heads": {"hidden_size": 384, "attention_heads": 6, **FEWER},
}
THEIRS: dict[str, dict[str, Any]] = {
    "llm-compressor's Wanda, 50%": {"method": "wanda", "mask_structure": "0:0"},
    "llm-compressor's SparseGPT, 50%": {"method": "sparsegpt", "mask_structure": "0:0"},
    "llm-compressor's Wanda, 2:4": {"method": "wanda", "mask_structure": "2:4"},
    "llm-compressor's SparseGPT, 2:4": {"method": "sparsegpt", "mask_structure": "2:4"},
}
BATCH_SIZE = 8
"""Sequences at once, in both."""


@dataclass(frozen=True)
class Found:
    """What one method made of one model."""

    perplexity: float
    zeros: float
    """Share of zeros in the linear layers of the decoder blocks."""
    parameters: int
    cache_bytes: int
    """Of a token."""
    seconds: float | None

    @classmethod
    def of(cls, model: Path, seconds: float | None, asked: argparse.Namespace) -> Found:
        """Measure a model that was pruned in so many seconds."""
        from optkit.model.checkpoint import Checkpoint
        from optkit.stages.prune_structured import sizes

        left = sizes(Checkpoint(model).shape)
        return cls(
            perplexity(model, asked), zeros(model), left["parameters"], left["kv_cache_bytes_per_token"], seconds
        )


def measure_ours(name: str, model: Path, asked: argparse.Namespace) -> Found:
    """Prune with optkit and measure."""
    from optkit.stage import Context
    from optkit.stages.prune import Prune
    from optkit.stages.prune_structured import PruneStructured

    if name in STRUCTURED:
        stage: Any = PruneStructured.model_validate(STRUCTURED[name])
    elif (fields := OURS[name]) is None:
        return Found.of(model, None, asked)
    else:
        stage = Prune.model_validate({**fields, "batch_size": BATCH_SIZE})
    with tempfile.TemporaryDirectory() as place:
        report = stage.run(model, Path(place), Context(device=asked.device, data=asked.data))
        return Found.of(Path(place), report.details["seconds"], asked)


def measure_theirs(fields: dict[str, Any], model: Path, asked: argparse.Namespace) -> Found:
    """Prune with llm-compressor, in its own environment, and measure with ours."""
    from optkit.source.calibration import Calibration

    tokens = Calibration.model_validate(CALIBRATION).tokens(model, asked.data).tolist()
    with tempfile.TemporaryDirectory() as place:
        request = {**fields, "model": str(model), "target": f"{place}/pruned", "tokens": tokens, "device": asked.device}
        (Path(place) / "request.json").write_text(json.dumps(request), encoding="utf-8")
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = [asked.llmcompressor, __file__, "--worker", f"{place}/request.json"]
        said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        return Found.of(Path(place) / "pruned", float(said.split()[-1]), asked)


def perplexity(model: Path, asked: argparse.Namespace) -> float:
    """Return the perplexity of a checkpoint, NaN if it was not asked for."""
    import optkit

    if asked.time:
        return math.nan

    recipe = {
        "name": "pruned",
        "model": {"name": str(model)},
        "stages": [],
        "evals": [{"perplexity": WINDOWS}],
        "attribution": False,
    }
    with tempfile.TemporaryDirectory() as out:
        loaded = optkit.load_recipe(recipe)
        scorecard = optkit.run(
            loaded, out=Path(out) / "measured", store=asked.store, data=asked.data, device=asked.device
        )
    return next(row.metric.value for row in scorecard.rows if row.metric.name == "perplexity")


def zeros(model: Path) -> float:
    """Return the share of zeros in the linear layers of the decoder blocks."""
    from optkit.model.checkpoint import Checkpoint
    from optkit.model.linear_layers import layers_of

    checkpoint = Checkpoint(model)
    found = [checkpoint.read(f"{name}.weight") for name in layers_of(checkpoint.shape)]
    return 1 - sum(int(weight.count_nonzero()) for weight in found) / sum(weight.numel() for weight in found)


def work(request: dict[str, Any]) -> None:
    """Prune with llm-compressor; runs in its environment, where there may be no optkit, and prints
    the seconds.
    """
    import time

    import torch
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    if importlib.util.find_spec("datasets") is None:
        sys.modules.update(
            {name: _NoDatasets(name) for name in ("datasets", "datasets.formatting", "datasets.formatting.formatting")}
        )
    from llmcompressor import oneshot
    from llmcompressor.modifiers.pruning.sparsegpt import SparseGPTModifier
    from llmcompressor.modifiers.pruning.wanda import WandaPruningModifier

    modifier = {"sparsegpt": SparseGPTModifier, "wanda": WandaPruningModifier}[request["method"]]
    tokens = [
        {"input_ids": torch.tensor(window), "attention_mask": torch.ones(len(window), dtype=torch.int64)}
        for window in request["tokens"]
    ]
    started = time.monotonic()
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype="auto", local_files_only=True).to(
        request["device"]
    )
    with torch.no_grad():
        oneshot(
            model=model,
            recipe=[modifier(sparsity=0.5, mask_structure=request["mask_structure"], ignore=["re:.*lm_head"])],
            dataset=DataLoader(tokens, batch_size=BATCH_SIZE),
            num_calibration_samples=len(tokens),
        )
    model.save_pretrained(request["target"])
    seconds = time.monotonic() - started
    for file in Path(request["model"]).glob("*token*"):
        (Path(request["target"]) / file.name).write_bytes(file.read_bytes())
    print(f"\n{seconds:.1f}")


class _NoDatasets(types.ModuleType):
    """Stands in for `datasets`, which llm-compressor imports: the tokens come as a DataLoader, so
    that nothing of it is called.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def main() -> None:
    """Print a line as each method is measured on all models."""
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--only", default="*")
    parser.add_argument("--store", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--llmcompressor", help="a Python with llm-compressor")
    parser.add_argument("--samples", type=int, default=CALIBRATION["samples"])
    parser.add_argument("--time", action="store_true")
    asked = parser.parse_args()
    CALIBRATION["samples"] = asked.samples
    print(
        "| method |",
        " | ".join(f"perplexity {model.name}" for model in asked.models),
        "| zeros | parameters | KV bytes | seconds |",
    )
    print("|---" * (len(asked.models) + 5) + "|")
    theirs = THEIRS if asked.llmcompressor else {}
    for name in [name for name in (*OURS, *theirs, *STRUCTURED) if fnmatch(name, asked.only)]:
        found = [
            measure_theirs(theirs[name], model, asked) if name in theirs else measure_ours(name, model, asked)
            for model in asked.models
        ]
        first, seconds = found[0], next((f"{each.seconds:.0f}" for each in found if each.seconds is not None), "-")
        left = f"{first.zeros:.1%} | {first.parameters:,} | {first.cache_bytes:,}"
        print("|", " | ".join([name, *(f"{each.perplexity:.2f}" for each in found), left, seconds]), "|", flush=True)


if __name__ == "__main__":
    main()
