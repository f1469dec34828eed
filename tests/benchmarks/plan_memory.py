"""What `optkit plan` says that stages need, beside what they take: bytes of main memory, of a GPU and of the disk.

    python -m tests.benchmarks.plan_memory SHAPE STAGE... [--blocks N] [--device cuda] [--samples 16] [--length 256]

SHAPE is one of tests/support/shapes.py, with random weights, or zeros that take no room on the disk
(--holes, for stages without a text); STAGE is an entry of a recipe in which
TEXT stands for a calibration on random letters. Each stage begins with that model, and each step of
it prints one line of JSON; how far it is goes to stderr. A small model of the same architecture runs
through the stage before, so that imports and compiling are no part of it. Of main memory it is the
resident set, less what it was before the step. Of a GPU it is what torch allocated.
"""

import argparse
import gc
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from optkit_cli.progress import LineProgress

from optkit.devices.peak_memory import watched_peak
from optkit.execute import run_step
from optkit.model.checkpoint import Checkpoint
from optkit.model.memory import return_freed_memory
from optkit.plan import make_plan
from optkit.recipe.recipe import load_recipe
from optkit.stage import Context
from optkit.store.store import Store
from tests.support.shapes import write_holes, write_random


def measured(source: Path, stage: str, device: str, place: Path) -> Iterator[dict[str, Any]]:
    """Yield, for each step of a stage on a model, what was said of it and what it took."""
    place.mkdir()
    recipe = place / "recipe.yaml"
    recipe.write_text(f"model: {source}\nstages:\n- {stage}\n", encoding="utf-8")
    plan = make_plan(load_recipe(recipe).pinned(None), Store(place / "store"), device)
    given = source
    for number, step in enumerate(plan.steps[1:]):
        (target := place / str(number)).mkdir()
        said = LineProgress(sys.stderr, interval_s=10)
        context = Context(device, progress=said, origin=source, workspace=place / f"work-{number}")
        gc.collect()
        return_freed_memory(device)
        before, start = psutil.Process().memory_info().rss, time.perf_counter()
        with ExitStack() as stack:
            ram = stack.enter_context(watched_peak("cpu"))
            gpu = stack.enter_context(watched_peak(device)) if device != "cpu" else None
            run_step(plan, step, given, target, context)
        taken = {"ram": (ram.size_bytes or 0) - before, "gpu": (gpu.size_bytes or 0) if gpu else 0}
        taken["disk"] = sum(file.stat().st_size for file in target.rglob("*.safetensors"))
        cost = {"ram": step.cost.ram_bytes, "gpu": step.cost.gpu_bytes, "disk": step.cost.disk_bytes}
        yield {"step": step.kind, "seconds": round(time.perf_counter() - start, 1)} | {
            name: {"plan": cost[name], "measured": size, "ratio": round(cost[name] / size, 3)}
            for name, size in taken.items()
            if size > 0
        }
        if given != source:
            shutil.rmtree(given)
        given = target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("stages", nargs="+")
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--holes", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        text = place / "letters.txt"
        letters = random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=2 * asked.samples * asked.length + 4_000)
        text.write_text("".join(letters), encoding="utf-8")
        calibration = f"{{dataset: {text}, samples: {asked.samples}, sequence_length: {asked.length}}}"
        started = time.perf_counter()
        source = place / asked.shape
        if asked.holes:
            write_holes(asked.shape, source, asked.blocks)
        else:
            write_random(asked.shape, source, asked.blocks)
        made = {"made": asked.shape, "blocks": asked.blocks, "bytes": Checkpoint(source).shape.size_bytes}
        print(json.dumps({**made, "seconds": round(time.perf_counter() - started, 1)}), flush=True)
        small = write_random(asked.shape, place / "small", 2, small=True)
        few = f"{{dataset: {text}, samples: 8, sequence_length: 256}}"
        for number, stage in enumerate(asked.stages):
            list(measured(small, stage.replace("TEXT", few), asked.device, place / f"warm-{number}"))
            for row in measured(source, stage.replace("TEXT", calibration), asked.device, place / f"run-{number}"):
                print(json.dumps({"shape": asked.shape, "stage": stage, **row}), flush=True)
            shutil.rmtree(place / f"run-{number}")


if __name__ == "__main__":
    main()
