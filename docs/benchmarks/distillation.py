"""How much of the perplexity that depth-pruning costs `distill` recovers, on real text, for a
budget of minutes.

    python docs/benchmarks/distillation.py DATA MODEL --minutes 20                    # two CPU cores
    python docs/benchmarks/distillation.py DATA MODEL --minutes 0.75 --device cuda    # one GPU

DATA holds `wikitext2_raw/` and `c4_sample/`. A fifth of MODEL's decoder blocks is removed by
perplexity, one by one, or STUDENT (another directory) is taken for what is left. Trained on C4's
sample and WikiText-2's validation split. Perplexity on the first 15 windows of 2048 tokens of
WikiText-2's test split.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import optkit
from optkit.store.store import Store

TEXTS = ["c4", {"dataset": "wikitext2", "split": "validation"}]
SHARED: dict[str, Any] = {"texts": TEXTS, "patience": None, "checkpoint_minutes": 10}
CPU = {"sequence_length": 256, "batch_size": 4, "learning_rate": 5e-4, "epochs": 1, "held_out": 16, "evaluations": 4}
GPU = {
    "sequence_length": 512,
    "batch_size": 32,
    "learning_rate": 1e-3,
    "epochs": 1000,
    "held_out": 32,
    "evaluations": 2,
}
FEWER_BLOCKS = {
    **{"remove_layers": 0.2, "layer_importance": "perplexity", "layer_search": "one_by_one"},
    "calibration": {"dataset": "c4", "samples": 32, "sequence_length": 512},
}
WINDOWS = {"dataset": "wikitext2", "split": "test", "window": 2048}


def fields_of(asked: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `distill`."""
    chosen = {**SHARED, **(CPU if asked.device == "cpu" else GPU), "minutes": asked.minutes}
    return chosen | json.loads(asked.fields)


def main() -> None:
    """Print the perplexity before, after pruning and after distilling, and what the training took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--student", type=Path)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=15)
    parser.add_argument(
        "--fields", default="{}", help="further fields of distill as JSON, e.g. '{\"learning_rate\": 1e-3}'"
    )
    parser.add_argument("--store", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    fields = fields_of(asked)
    with tempfile.TemporaryDirectory() as folder:
        store, out = asked.store or Path(folder) / "store", asked.out or Path(folder) / "out"
        model = {"name": str(asked.student or asked.model)}
        prune: list[dict[str, Any]] = [] if asked.student else [{"prune_structured": FEWER_BLOCKS}]
        if asked.student:
            fields["teacher"] = {"name": str(asked.model)}
        shared = {"device": asked.device, "data": asked.data, "store": store}
        measured: dict[str, float] = {}
        for name, start, stages in (
            ("original", {"name": str(asked.model)}, []),
            ("pruned", model, prune),
            ("distilled", model, [*prune, {"distill": fields}]),
        ):
            recipe = {
                "name": name,
                "model": start,
                "stages": stages,
                "evals": [{"perplexity": {**WINDOWS, "windows": asked.windows}}],
                "attribution": False,
            }
            began = time.perf_counter()
            card = optkit.run(optkit.load_recipe(recipe), out=out / name, **shared)
            measured[name] = next(row.metric.value for row in card.rows if row.metric.name == "perplexity")
            print(f"{name}: perplexity {measured[name]:.3f} ({time.perf_counter() - began:.0f} s)", flush=True)
        lost, won = measured["pruned"] - measured["original"], measured["pruned"] - measured["distilled"]
        print(f"recovered: {won / lost:.1%} of {lost:.3f}")
        records = [json.loads(path.read_text()) for path in (Store(store).root / "steps").glob("*/record.json")]
        done = next(
            record for record in records if record["kind"] == "distill" and record["fields"]["minutes"] == asked.minutes
        )
        said = {name: value for name, value in done["report"]["details"].items() if name != "curve"}
        print(f"distill: {done['seconds']:.0f} s in all;", json.dumps(said))


if __name__ == "__main__":
    main()
