"""ONNX artifacts by one protocol: perplexity, divergence from the unmodified model and size, as a
Markdown table.

    python docs/benchmarks/onnx_artifacts.py DATA MODEL... [--only PATTERN] [--store DIR]

DATA holds `wikitext2_raw/` and `c4_sample/`. GPTQ is calibrated on 64 x 512 tokens of C4;
perplexity on the first 15 windows of 2048 tokens of WikiText-2's test split, divergence on the
first three, through optkit's session. What the store holds is not measured again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any

import optkit

Stages = list[dict[str, Any]]
WINDOWS = {"dataset": "wikitext2", "split": "test", "window": 2048}
EVALS = [{"perplexity": {**WINDOWS, "windows": 15}}, {"divergence": {**WINDOWS, "windows": 3}}, "footprint"]
TEXT = {"dataset": "c4", "samples": 64, "sequence_length": 512}
HEADS: dict[str, dict[str, Any]] = {
    "lm_head float": {"lm_head": "keep"},
    "lm_head 8": {"lm_head": 8, "embedding": "keep"},
    "lm_head 8, embedding shared": {"lm_head": 8, "embedding": "shared"},
    "lm_head 4": {"lm_head": 4},
}
"""What becomes of lm_head, as both stages call it."""


def rounded(**fields: Any) -> Stages:
    """Return the stages that export float weights and round them in the graph."""
    return [{"onnx": {}}, {"onnx_quantize": fields}]


def from_gptq(symmetric: bool, **fields: Any) -> Stages:
    """Return the stages that export GPTQ's codes, in groups of 32."""
    return [{"gptq": {"group_size": 32, "symmetric": symmetric, "calibration": TEXT}}, {"onnx": fields}]


def artifacts() -> dict[str, Stages]:
    """Return what is measured, by name."""
    grids = {"symmetric": True, "asymmetric": False}
    found: dict[str, Stages] = {"float32": [{"onnx": {}}], "float16": [{"onnx": {"dtype": "float16"}}]}
    found |= {f"rtn, {grid}": rounded(algorithm="rtn", symmetric=grids[grid]) for grid in grids}
    found |= {f"mse, {grid}": rounded(algorithm="mse", symmetric=grids[grid]) for grid in grids}
    found |= {"k_quant": rounded(algorithm="k_quant")}
    found |= {f"gptq, {grid}": from_gptq(grids[grid]) for grid in grids}
    found |= {f"gptq, asymmetric, {head}": from_gptq(False, **HEADS[head]) for head in HEADS}
    found |= {f"mse, asymmetric, {head}": rounded(**HEADS[head]) for head in ("lm_head float", "lm_head 4")}
    found["gptq, asymmetric, lm_head float, float activations"] = from_gptq(False, activations="float")
    found["mse, asymmetric, float activations"] = rounded(activations="float")
    found["hqq"] = rounded(algorithm="hqq")
    return found


def measure(stages: Stages, model: Path, data: Path, store: Path | None) -> dict[str, float]:
    """Make an artifact, measure it and return its numbers by their names."""
    recipe = {"name": "onnx", "model": {"name": str(model)}, "stages": stages, "evals": EVALS, "attribution": False}
    with tempfile.TemporaryDirectory() as out:
        scorecard = optkit.run(optkit.load_recipe(recipe), out=Path(out) / "artifact", store=store, data=data)
    return {row.metric.name: row.metric.value for row in scorecard.rows}


def main() -> None:
    """Print a line for each artifact of each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--only", default="*")
    parser.add_argument("--store", type=Path)
    asked = parser.parse_args()
    print("| artifact | model | perplexity | KL | size |", "|---" * 5 + "|", sep="\n")
    for (name, stages), model in product(artifacts().items(), asked.models):
        if fnmatch(name, asked.only):
            try:
                found = measure(stages, model, asked.data, asked.store)
            except optkit.OptkitError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            divergence, size = found["kl_divergence"], found["size_bytes"] / 1e6
            print(
                f"| {name} | {model.name} | {found['perplexity']:.3f} | {divergence:.4f} | {size:.0f} MB |", flush=True
            )


if __name__ == "__main__":
    main()
