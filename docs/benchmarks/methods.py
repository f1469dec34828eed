"""Every quantization method of optkit by one protocol: perplexity, divergence, size and CPU time,
as a Markdown table.

    python docs/benchmarks/methods.py DATA MODEL... [--only PATTERN] [--store DIR] [--device DEVICE]
        [--seed N] [--bos window] [--text half] [--samples 64]

DATA holds `wikitext2_raw/` and `c4_sample/`. Calibrated on 64 x 512 tokens of C4; perplexity on the
first 15 windows of 2048 tokens of WikiText-2's test split, through optkit's session. What the store
holds is not measured again (its times and GPU memory are then shown as `-`). `--bos window` puts the
token that begins a text in front of each window, of the calibration too; Gemma needs it.

`--text` calibrates on a third of C4's sample, of WikiText-2's validation split or of half of each: the
N-th of `--seed N`, from 0 to 2. KL is then measured on the last tenth of C4's documents too, which no
third has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

import optkit
from optkit.pipeline import plan

TEXT = {"calibration": {"dataset": "c4", "samples": 64, "sequence_length": 512}}
AGAIN = {"tokens": 15 * 64 * 512, "epochs": 15}
"""As many tokens as blocks learn from in 120 steps of 8 sequences."""
GRID = {"group_size": 64}
WINDOWS = {"dataset": "wikitext2", "split": "test", "window": 2048, "windows": 15}
EVALS = [{"perplexity": WINDOWS}, {"divergence": WINDOWS}, "footprint"]


def stage(kind: str, **fields: Any) -> dict[str, Any]:
    """Return a recipe's stage."""
    return {kind: fields}


GPTQ = stage("gptq", **GRID, **TEXT)
GPTQ3 = stage("gptq", bits=3, **GRID, **TEXT)
HEADS = stage("rotate", residual=False)
BF16 = stage("cast", dtype="bfloat16")
INPUTS = {"activations": "dynamic", **TEXT}
METHODS: dict[str, list[dict[str, Any]]] = {
    "unmodified": [],
    "rotate + smoothquant": [stage("rotate"), stage("smoothquant", **TEXT)],
    "smoothquant": [stage("smoothquant", **TEXT)],
    "fp8, weights alone, gptq": [stage("fp8", activations="none", rounding="gptq", **TEXT)],
    "fp8, dynamic, gptq": [stage("fp8", rounding="gptq", **TEXT)],
    "int8, LLM.int8()": [stage("int8")],
    "fp8, dynamic": [stage("fp8")],
    "fp8, static, one scale for a tensor": [stage("fp8", activations="static", scales="tensor", **TEXT)],
    "gptq, asymmetric 32": [stage("gptq", group_size=32, symmetric=False, **TEXT)],
    "gptq, asymmetric 32 + kv_scales": [
        stage("gptq", group_size=32, symmetric=False, **TEXT),
        stage("kv_scales", **TEXT),
    ],
    "cast + auto_bits, 4.5 bits": [BF16, stage("auto_bits", average_bits=4.5, **TEXT)],
    "cast + auto_bits, 4.25 bits": [BF16, stage("auto_bits", average_bits=4.25, **TEXT)],
    "cast + gptq, symmetric 32": [BF16, stage("gptq", group_size=32, **TEXT)],
    "awq_scale + gptq": [stage("awq_scale", **GRID, **TEXT), GPTQ],
    "gptq": [GPTQ],
    "rotate (heads) + gptq": [HEADS, GPTQ],
    "awq, asymmetric": [stage("awq", symmetric=False, **GRID, **TEXT)],
    "awq, symmetric": [stage("awq", symmetric=True, **GRID, **TEXT)],
    "nf4": [stage("nf4")],
    "fp4": [stage("nf4", type="fp4")],
    "cast + nvfp4": [BF16, stage("mx", type="nvfp4")],
    "cast + nvfp4, minmax": [BF16, stage("mx", type="nvfp4", scale_search="minmax")],
    "cast + mxfp4": [BF16, stage("mx", type="mxfp4")],
    "cast + nvfp4, gptq": [BF16, stage("mx", type="nvfp4", rounding="gptq", **TEXT)],
    "cast + mxfp4, gptq": [BF16, stage("mx", type="mxfp4", rounding="gptq", **TEXT)],
    "cast + nvfp4, inputs too": [BF16, stage("mx", **INPUTS)],
    "cast + nvfp4, gptq, inputs too": [BF16, stage("mx", rounding="gptq", **INPUTS)],
    "rotate + cast + nvfp4, gptq, inputs too": [stage("rotate"), BF16, stage("mx", rounding="gptq", **INPUTS)],
    "rotate (heads) + cast + nvfp4, gptq, inputs too": [HEADS, BF16, stage("mx", rounding="gptq", **INPUTS)],
    "cast + nvfp4 that learns": [BF16, stage("mx", effort="best", **TEXT)],
    "cast + nvfp4 that learns, inputs too": [BF16, stage("mx", effort="best", **INPUTS)],
    "cast + mxfp4 that learns": [BF16, stage("mx", type="mxfp4", effort="best", **TEXT)],
    "cast + mxfp4 that learns, inputs too": [BF16, stage("mx", type="mxfp4", effort="best", **INPUTS)],
    "rotate + cast + nvfp4, gptq": [stage("rotate"), BF16, stage("mx", rounding="gptq", **TEXT)],
    "cast + mxfp4, gptq, inputs too": [BF16, stage("mx", type="mxfp4", rounding="gptq", **INPUTS)],
    "rotate + cast + mxfp4, gptq, inputs too": [
        stage("rotate"),
        BF16,
        stage("mx", type="mxfp4", rounding="gptq", **INPUTS),
    ],
    "rtn": [stage("rtn", **GRID)],
    "gptq, 3 bits": [GPTQ3],
    "awq_scale + gptq, 3 bits": [stage("awq_scale", bits=3, **GRID, **TEXT), GPTQ3],
    "rotate (heads) + gptq, 3 bits": [HEADS, GPTQ3],
}
for kind in ("nvfp4", "mxfp4"):
    for label, fields in (("", TEXT), (", inputs too", INPUTS)):
        scales = [stage("awq_scale", type=kind, **fields), BF16]
        METHODS |= {
            f"awq_scale + cast + {kind}, gptq{label}": [*scales, stage("mx", type=kind, rounding="gptq", **fields)],
            f"awq_scale + cast + {kind} that learns{label}": [*scales, stage("mx", type=kind, effort="best", **fields)],
        }
for bits, group in ((bits, group) for group in (64, 96, 128, 192) for bits in (4, 3, 2)):
    grid = {"bits": bits, "group_size": group, **TEXT}
    rounded = {**grid, "backend": "auto_round", "learn": "blocks"}
    METHODS |= {
        f"gptq, {bits} bits of {group}": [stage("gptq", **grid)],
        f"gptq that learns, {bits} bits of {group}": [stage("gptq", effort="best", **grid)],
        f"blocks alone, {bits} bits of {group}": [stage("gptq", effort="best", scale_steps=0, **grid)],
        f"scales alone, {bits} bits of {group}": [stage("gptq", effort="best", learning_steps=0, **grid)],
        f"gptq, earlier errors, {bits} bits of {group}": [stage("gptq", earlier_errors=0.5, **grid)],
        f"gptqmodel, {bits} bits of {group}": [stage("gptq", backend="gptqmodel", **grid)],
        f"gptqmodel, GPTAQ 0.25, {bits} bits of {group}": [
            stage("gptq", backend="gptqmodel", earlier_errors=0.25, **grid)
        ],
        f"llmcompressor, {bits} bits of {group}": [stage("gptq", backend="llmcompressor", **grid)],
        f"AutoRound 200, {bits} bits of {group}": [stage("gptq", **rounded)],
        f"AutoRound 1000, {bits} bits of {group}": [stage("gptq", learning_steps=1000, **rounded)],
        f"qat, all of the text, {bits} bits of {group}": [stage("qat", **grid)],
        f"qat, 15 epochs of 64 x 512, {bits} bits of {group}": [stage("qat", training=AGAIN, **grid)],
    }


@dataclass(frozen=True)
class Found:
    """What one method made of one model."""

    perplexity: float
    divergences: list[float]
    """Nats a token, on each text; none for the unmodified model."""
    size_bytes: float
    bits: float | None
    """For each weight of the quantized layers."""
    spent: Spent | None
    """On the stages; None if they lay in the store."""


@dataclass(frozen=True)
class Spent:
    """What making an artifact took, of its first byte read to its last written."""

    cpu_s: float
    """User CPU."""
    wall_s: float
    gpu_bytes: int
    """The most that torch held on the GPU in this process."""


@dataclass(frozen=True)
class Texts:
    """What methods calibrate on, and on which further text KL is measured."""

    bos: str = "tokenizer"
    calibration: Mapping[str, Any] = field(default_factory=dict)
    """Fields in place of those of `TEXT`."""
    further: Path | None = None


def thirds(data: Path, text: str, number: int, samples: int, bos: str, place: Path) -> Texts:
    """Write a third of a text into a directory, and what of C4 no third has."""
    files = sorted((data / "c4_sample").glob("*.jsonl"))
    documents = [json.loads(line)["text"] for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    last = len(documents) * 9 // 10
    wikitext2 = (data / "wikitext2_raw" / "wiki.valid.raw").read_text(encoding="utf-8")
    third = len(wikitext2) // 3
    parts = ["\n\n".join(documents[number:last:3]), wikitext2[number * third : (number + 1) * third]]
    shorter = min(map(len, parts))
    chosen = {"c4": parts[:1], "wikitext2": parts[1:], "half": [part[:shorter] for part in parts]}[text]
    written = {"calibration.txt": chosen, "further.txt": documents[last:]}
    for name, each in written.items():
        (place / name).write_text("\n\n".join(each), encoding="utf-8")
    return Texts(bos, {"dataset": str(place / "calibration.txt"), "samples": samples}, place / "further.txt")


def measure(
    name: str, model: Path, data: Path, store: Path | None, device: str, seed: int = 0, texts: Texts | None = None
) -> Found:
    """Run a method and measure what it leaves."""
    texts = texts or Texts()
    further = [{"divergence": {"dataset": str(texts.further), "window": 2048, "windows": 15}}] if texts.further else []
    evals = [_with(each, bos=texts.bos) for each in [*EVALS, *further] if METHODS[name] or "divergence" not in each]
    recipe = {
        "name": "method",
        "model": {"name": str(model)},
        "stages": [_with(each, bos=texts.bos, **texts.calibration) for each in METHODS[name]],
        "evals": evals,
        "attribution": False,
        "seed": seed,
    }
    with tempfile.TemporaryDirectory() as out:
        todo = plan(optkit.load_recipe(recipe), store=store, data=data, device=device)
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        before = os.times()
        began = time.perf_counter()
        if METHODS[name]:
            optkit.run(
                optkit.load_recipe({**recipe, "evals": []}),
                out=Path(out) / "made",
                store=store,
                data=data,
                device=device,
            )
        gpu_bytes = torch.cuda.max_memory_allocated() if device != "cpu" else 0
        spent = Spent(os.times().user - before.user, time.perf_counter() - began, gpu_bytes)
        scorecard = optkit.run(
            optkit.load_recipe(recipe), out=Path(out) / "measured", store=store, data=data, device=device
        )
    numbers = {row.metric.name: row.metric.value for row in scorecard.rows}
    bits = numbers.get("bits_per_quantized_weight")
    return Found(
        numbers["perplexity"],
        [row.metric.value for row in scorecard.rows if row.metric.name == "kl_divergence"],
        numbers["size_bytes"],
        bits,
        spent if todo.pending else None,
    )


def _with(part: Any, **fields: Any) -> Any:
    """Return a stage or an eval whose texts have these fields."""
    if not isinstance(part, dict):
        return part
    added = fields if "dataset" in part else {}
    return {name: _with(value, **fields) for name, value in part.items()} | added


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--only", default="*")
    parser.add_argument("--store", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bos", choices=("tokenizer", "window", "text", "none"), default="tokenizer")
    parser.add_argument("--text", choices=("c4", "wikitext2", "half"))
    parser.add_argument("--samples", type=int, default=64)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        thirds_of = asked.text, asked.seed, asked.samples, asked.bos, Path(place)
        print_rows(asked, thirds(asked.data, *thirds_of) if asked.text else Texts(asked.bos))


def print_rows(asked: argparse.Namespace, texts: Texts) -> None:
    """Print a line as each method is measured on all models."""
    kinds = ["KL", *(["KL, C4"] if texts.further else [])]
    names = [f"{what} {model.name}" for what in ("perplexity", *kinds) for model in asked.models]
    print("| method | bits |", " | ".join(names), "| size | user CPU | time | GPU |")
    print("|---" * (len(names) + 6) + "|")
    for name in METHODS:
        if fnmatch(name, asked.only):
            try:
                where = asked.store, asked.device, asked.seed, texts
                found = [measure(name, model, asked.data, *where) for model in asked.models]
            except optkit.OptkitError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            cells = [name, _cell(found[0].bits, ".2f"), *(f"{each.perplexity:.3f}" for each in found)]
            cells += [
                f"{each.divergences[index]:.4f}" if each.divergences else "-"
                for index in range(len(kinds))
                for each in found
            ]
            cells += [f"{found[0].size_bytes / 1e6:.0f} MB"]
            spent = next((each.spent for each in found if each.spent), None)
            cells += [f"{spent.cpu_s:.0f} s", f"{spent.wall_s:.1f} s"] if spent else ["-", "-"]
            cells += [f"{spent.gpu_bytes / 2**30:.2f} GiB" if spent and spent.gpu_bytes else "-"]
            print("|", " | ".join(cells), "|", flush=True)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


if __name__ == "__main__":
    main()
