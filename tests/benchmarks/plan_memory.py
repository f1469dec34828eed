"""What `optkit plan` says that stages need, beside what they take: bytes of main memory, of a GPU and of the disk.
And how long they take, as a whole and in the median from block to block.

    python -m tests.benchmarks.plan_memory SHAPE STAGE... [--blocks N] [--device cuda] [--samples 16] [--length 256]
        [--held-out 4] [--kernels 20]

SHAPE is one of tests/support/shapes.py, with random weights, or zeros that take no room on the disk
(--holes, for stages without a text); STAGE is an entry of a recipe in which
TEXT stands for a calibration on random letters, or `copy`: a plain copy of the checkpoint, for comparison.
Each stage begins with that model, and each step of
it prints one line of JSON; how far it is goes to stderr. A small model of the same architecture runs
through the stage before, so that imports and compiling are no part of it, but for a `backend`, which
has a process of its own. Of main memory it is the
resident set, less what it was before the step. Of a GPU it is what torch allocated here. With
--held-out a line has the mean KL of the next token from the model's, in nats, on so many other sequences,
and with --kernels what took the most of the GPU, by torch's profiler, which costs time.
$TMPDIR says where all of it lies; PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:0.057 leaves 8 of 140 GB.
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
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from optkit_cli.progress import LineProgress, LineTask, Pace
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from optkit.devices.peak_memory import watched_peak
from optkit.execute import run_step
from optkit.model.checkpoint import Checkpoint
from optkit.model.memory import return_freed_memory
from optkit.model.skeleton import Skeleton
from optkit.plan import make_plan
from optkit.progress import Task
from optkit.recipe.recipe import load_recipe
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.sensitivity.held_out import mean_divergences
from optkit.store.store import Store
from tests.support.shapes import write_holes, write_random

LETTERS = "abcdefghijklmnopqrstuvwxyz "


class BlockTimes(LineProgress):
    """Lines, and when each block was finished."""

    finished: tuple[float, ...] = ()

    def task(self, label: str, total: int, unit: str = "") -> Task:
        self.finished = ()
        return (
            BlockTask(self, Pace(label, total, unit, self.clock))
            if unit == "blocks"
            else super().task(label, total, unit)
        )


class BlockTask(LineTask):
    progress: BlockTimes

    def advance(self, steps: int = 1, note: str = "") -> None:
        if steps:
            self.progress.finished += (self.pace.elapsed_s,)
        super().advance(steps, note)


def longest(profiler: Any, count: int) -> dict[str, Any]:
    """Return the milliseconds of a GPU, of the kernels that took the most of it too, each with its calls."""
    ran = sorted(profiler.key_averages(), key=lambda each: -each.self_device_time_total)
    told = {each.key[:120]: [round(each.self_device_time_total / 1000, 1), each.count] for each in ran[:count]}
    return {"gpu_ms": round(sum(each.self_device_time_total for each in ran) / 1000, 1), "kernels": told}


def measured(
    source: Path, stage: str, device: str, place: Path, held_out: Tensor | None = None, kernels: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield, for each step of a stage on a model, what was said of it and what it took."""
    place.mkdir()
    recipe = place / "recipe.yaml"
    recipe.write_text(f"model: {source}\nstages:\n- {stage}\n", encoding="utf-8")
    plan = make_plan(load_recipe(recipe).pinned(None), Store(place / "store"), device)
    given = source
    for number, step in enumerate(plan.steps[1:]):
        (target := place / str(number)).mkdir()
        said = BlockTimes(sys.stderr, interval_s=10)
        context = Context(device, progress=said, origin=source, workspace=place / f"work-{number}")
        gc.collect()
        return_freed_memory(device)
        before, start = psutil.Process().memory_info().rss, time.perf_counter()
        with ExitStack() as stack:
            ram = stack.enter_context(watched_peak("cpu"))
            gpu = stack.enter_context(watched_peak(device)) if device != "cpu" else None
            seen = stack.enter_context(profile(activities=[ProfilerActivity.CUDA])) if kernels else None
            run_step(plan, step, given, target, context)
        seconds = {"seconds": round(time.perf_counter() - start, 1)}
        if len(said.finished) > 1:
            seconds["block_s"] = round(median(after - before for before, after in pairwise(said.finished)), 2)
        taken = {"ram": (ram.size_bytes or 0) - before, "gpu": (gpu.size_bytes or 0) if gpu else 0}
        taken["disk"] = sum(file.stat().st_size for file in target.rglob("*.safetensors"))
        cost = {"ram": step.cost.ram_bytes, "gpu": step.cost.gpu_bytes, "disk": step.cost.disk_bytes}
        row = {"step": step.kind, **seconds} | {
            name: {"plan": cost[name], "measured": size, "ratio": round(cost[name] / size, 3)}
            for name, size in taken.items()
            if size > 0
        }
        if seen:
            row |= longest(seen, kernels)
        if held_out is not None:
            model, made = Skeleton(Checkpoint(source)), Checkpoint(target)
            row["kl"] = round(mean_divergences(model, [made], held_out, device, said)[0], 5)
        yield row
        if given != source:
            shutil.rmtree(given)
        given = target


def copied(source: Path, place: Path) -> float:
    """Return the seconds that a plain copy of a checkpoint takes."""
    start = time.perf_counter()
    shutil.copytree(source, place / "copy")
    seconds = time.perf_counter() - start
    shutil.rmtree(place / "copy")
    return round(seconds, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("stages", nargs="+")
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--held-out", type=int, default=0)
    parser.add_argument("--kernels", type=int, default=0)
    parser.add_argument("--holes", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        text, other = place / "letters.txt", place / "other.txt"
        for seed, (file, samples) in enumerate(((text, asked.samples), (other, asked.held_out))):
            letters = random.Random(seed).choices(LETTERS, k=2 * samples * asked.length + 4_000)
            file.write_text("".join(letters), encoding="utf-8")
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
        held_out = None
        if asked.held_out:
            unseen = Calibration(dataset=str(other), samples=asked.held_out, sequence_length=asked.length)
            held_out = unseen.tokens(source, None)
        for number, stage in enumerate(asked.stages):
            if stage == "copy":
                print(json.dumps({"shape": asked.shape, "stage": stage, "seconds": copied(source, place)}), flush=True)
                continue
            if "backend" not in stage:
                list(measured(small, stage.replace("TEXT", few), asked.device, place / f"warm-{number}"))
            asking = stage.replace("TEXT", calibration)
            for row in measured(source, asking, asked.device, place / f"run-{number}", held_out, asked.kernels):
                print(json.dumps({"shape": asked.shape, "stage": stage, **row}), flush=True)
            shutil.rmtree(place / f"run-{number}")


if __name__ == "__main__":
    main()
