"""Structured pruning before any distillation: what is left of a model and its perplexity, as a
Markdown table.

    python docs/benchmarks/structured_pruning.py DATA MODEL [--only PATTERN] [--store DIR] [--device DEVICE] \
        [--keep DIR]

DATA holds `wikitext2_raw/` and `c4_sample/`. What matters is measured on 32 x 512 tokens of C4;
perplexity on the first 15 windows of 2048 tokens of WikiText-2's test split, through optkit's
session. Seconds are those of the stage. `--keep` keeps the models, one directory each.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

TEXT = {"calibration": {"dataset": "c4", "samples": 32, "sequence_length": 512}}
WINDOWS = {"dataset": "wikitext2", "split": "test", "window": 2048, "windows": 15}
LOSS = {"layer_importance": "perplexity"}
METHODS: dict[str, dict[str, Any] | None] = {
    "unmodified": None,
    "20% of the blocks, block influence": {"remove_layers": 0.2},
    "20% of the blocks, block influence, one by one": {"remove_layers": 0.2, "layer_search": "one_by_one"},
    "20% of the blocks, block influence, contiguous": {"remove_layers": 0.2, "layer_search": "contiguous"},
    "20% of the blocks, perplexity": {"remove_layers": 0.2, **LOSS},
    "20% of the blocks, perplexity, one by one": {"remove_layers": 0.2, "layer_search": "one_by_one", **LOSS},
    "20% of the blocks, perplexity, contiguous": {"remove_layers": 0.2, "layer_search": "contiguous", **LOSS},
    "25% of the feed-forward channels": {"intermediate_size": 0.75},
    "25% of the feed-forward channels, not compensated": {"intermediate_size": 0.75, "compensate": False},
    "a third of the heads": {"attention_heads": 6},
    "a third of the heads, not compensated": {"attention_heads": 6, "compensate": False},
    "3 -> 1 heads of keys and values, pooled": {"kv_heads": 1},
    "3 -> 1 heads of keys and values, by importance": {"kv_heads": 1, "kv_method": "importance"},
    "a third of the hidden size, and of the heads": {"hidden_size": 384, "attention_heads": 6},
}


def prune(fields: dict[str, Any], source: Path, target: Path, asked: argparse.Namespace) -> float:
    """Fill `target`; return the seconds that the stage took."""
    from optkit.stage import Context
    from optkit.stages.prune_structured import PruneStructured

    target.mkdir(parents=True)
    report = PruneStructured.model_validate({**fields, **TEXT}).run(
        source, target, Context(device=asked.device, data=asked.data)
    )
    return float(report.details["seconds"])


def perplexity(model: Path, asked: argparse.Namespace, place: Path) -> float:
    """Return the perplexity of a checkpoint."""
    import optkit

    recipe = {
        "name": "pruned",
        "model": {"name": str(model)},
        "stages": [],
        "evals": [{"perplexity": WINDOWS}],
        "attribution": False,
    }
    scorecard = optkit.run(
        optkit.load_recipe(recipe), out=place / "measured", store=asked.store, data=asked.data, device=asked.device
    )
    return next(row.metric.value for row in scorecard.rows if row.metric.name == "perplexity")


def main() -> None:
    """Print a line as each method is measured."""
    from optkit.model.checkpoint import Checkpoint
    from optkit.stages.prune_structured import sizes

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", default="*")
    parser.add_argument("--store", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--keep", type=Path)
    asked = parser.parse_args()
    print(
        "| removed | parameters | KV cache, bytes a token | perplexity | seconds |\n|---|---|---|---|---|", flush=True
    )
    for name, fields in METHODS.items():
        if not fnmatch(name, asked.only):
            continue
        with tempfile.TemporaryDirectory(dir=asked.store) as place:
            model = Path(place) / "model" if fields else asked.model
            seconds = f"{prune(fields, asked.model, model, asked):.0f}" if fields else "-"
            left = sizes(Checkpoint(model).shape)
            cells = [name, f"{left['parameters']:,}", f"{left['kv_cache_bytes_per_token']:,}"]
            print("|", " | ".join([*cells, f"{perplexity(model, asked, Path(place)):.2f}", seconds]), "|", flush=True)
            if asked.keep and fields:
                shutil.copytree(model, asked.keep / name.replace(", ", "-").replace(" ", "_"), dirs_exist_ok=True)


if __name__ == "__main__":
    main()
