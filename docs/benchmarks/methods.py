"""Every quantization method of optkit by one protocol: perplexity, size and CPU time, as a Markdown table.

    python docs/benchmarks/methods.py DATA MODEL... [--only PATTERN] [--store DIR]

DATA holds `wikitext2_raw/` and `c4_sample/`. Calibrated on 64 x 512 tokens of C4; perplexity on the first 15 windows of 2048 tokens of
WikiText-2's test split, through optkit's session. What the store holds is not measured again (its CPU time is then shown as `-`).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import optkit
from optkit.pipeline import plan

TEXT = {"calibration": {"dataset": "c4", "samples": 64, "sequence_length": 512}}
GRID = {"group_size": 64}
EVALS = [{"perplexity": {"dataset": "wikitext2", "split": "test", "window": 2048, "windows": 15}}, "footprint"]


def stage(kind: str, **fields: Any) -> dict[str, Any]:
    """Return a recipe's stage."""
    return {kind: fields}


METHODS: dict[str, list[dict[str, Any]]] = {
    "unmodified": [],
    "rtn, 4 bits": [stage("rtn", **GRID)],
    "gptq, 4 bits": [stage("gptq", **GRID, **TEXT)],
    "gptq, 4 bits, asymmetric": [stage("gptq", symmetric=False, **GRID, **TEXT)],
    "awq, 4 bits": [stage("awq", symmetric=True, **GRID, **TEXT)],
    "awq, 4 bits, asymmetric": [stage("awq", symmetric=False, **GRID, **TEXT)],
    "awq_scale + gptq, 4 bits": [stage("awq_scale", **GRID, **TEXT), stage("gptq", **GRID, **TEXT)],
    "rotate (heads) + gptq, 4 bits": [stage("rotate", residual=False), stage("gptq", **GRID, **TEXT)],
    "gptq, 3 bits": [stage("gptq", bits=3, **GRID, **TEXT)],
    "awq_scale + gptq, 3 bits": [stage("awq_scale", bits=3, **GRID, **TEXT), stage("gptq", bits=3, **GRID, **TEXT)],
    "rotate (heads) + gptq, 3 bits": [stage("rotate", residual=False), stage("gptq", bits=3, **GRID, **TEXT)],
    "cast + auto_bits, 4.5 bits": [stage("cast", dtype="bfloat16"), stage("auto_bits", average_bits=4.5, **TEXT)],
    "nf4": [stage("nf4")],
    "fp4": [stage("nf4", type="fp4")],
    "nvfp4": [stage("mx", type="nvfp4")],
    "mxfp4": [stage("mx", type="mxfp4")],
    "int8, LLM.int8()": [stage("int8")],
    "smoothquant, W8A8": [stage("smoothquant", **TEXT)],
    "fp8, dynamic": [stage("fp8")],
    "fp8, static": [stage("fp8", activations="static", **TEXT)],
}


def measure(name: str, model: Path, data: Path, store: Path | None) -> tuple[float, float | None, float]:
    """Return perplexity, seconds of user CPU of the stages (None where they lay in the store), and bytes on disk."""
    recipe = {"name": "method", "model": {"name": str(model)}, "stages": METHODS[name], "evals": EVALS}
    with tempfile.TemporaryDirectory(dir=store) as out:
        todo = plan(optkit.load_recipe(recipe), store=store, data=data, device="cpu")
        before = os.times()
        if METHODS[name]:
            optkit.run(optkit.load_recipe({**recipe, "evals": []}), out=Path(out) / "made", store=store, data=data, device="cpu")
        spent = os.times().user - before.user if todo.pending else None
        scorecard = optkit.run(optkit.load_recipe(recipe), out=Path(out) / "measured", store=store, data=data, device="cpu")
    numbers = {row.metric.name: row.metric.value for row in scorecard.rows}
    return numbers["perplexity"], spent, numbers["size_bytes"]


def main() -> None:
    """Print a line as each method is measured on all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--only", default="*")
    parser.add_argument("--store", type=Path)
    asked = parser.parse_args()
    print("| method |", " | ".join(model.name for model in asked.models), "| size | user CPU |")
    print("|---" * (len(asked.models) + 3) + "|")
    for name in METHODS:
        if fnmatch(name, asked.only):
            try:
                found = [measure(name, model, asked.data, asked.store) for model in asked.models]
            except optkit.OptkitError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            spent = next((seconds for _, seconds, _ in found if seconds is not None), None)
            cells = [name, *(f"{perplexity:.3f}" for perplexity, _, _ in found), f"{found[0][2] / 1e6:.0f} MB"]
            print("|", " | ".join([*cells, "-" if spent is None else f"{spent:.0f} s"]), "|", flush=True)


if __name__ == "__main__":
    main()
