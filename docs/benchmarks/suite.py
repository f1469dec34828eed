"""Has a row become slower than its own history on this device? `make bench`.

    python -m docs.benchmarks.suite [--only PATTERN] [--repeats N] [--history FILE] [--accept]

Each row is a command, run several times in turns with the others. What it took is compared with
its earlier runs on the same device, in history.jsonl. A row is slower if the whole 95% interval of
the ratio lies above 1.03: that of one more run, by the spread of the earlier ones. Exit status 1
names it, and it is not written into the history unless `--accept` says that it is meant.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from optkit.common.statistics import Estimate, independent_ratio, mean, mean_estimate, standard_error, t_quantile
from optkit.environment import PACKAGES, best_device, describe_environment

ROOT = Path(__file__).parents[2]
HISTORY = Path(__file__).with_name("history.jsonl")
LEAST = 1.03
"""A smaller loss of time is none, however little the runs differ."""
RECENT = 10
"""Earlier runs that are looked at."""


BUSY = 0.5
"""Programs that run, for each core, from which on the user is warned."""


@dataclass(frozen=True)
class Row:
    """One thing that is timed."""

    name: str
    command: str
    """SCRATCH stands for a new directory, in which nothing is finished yet."""
    metric: str = ""
    """Of the scorecard that the command prints, a rate; without it the command's wall clock counts."""
    device: str = "cpu"


QUIET = "--json --quiet --store SCRATCH/store --out SCRATCH/made --set gates={}"
ONE_BLOCK = "--set 'stages.0.gptq.include=[\"*.layers.0.*\"]'"
SPEED = (
    "--set 'evals=[{throughput: {batch_sizes: [1], prompts: [128], new_tokens: 64, processes: 2, repeats: 2, "
    "warmup: 1, interval: 0.2, limit_s: 10}}]'"
)
"""Short: how far runs of the suite are apart says more than how far repeats of one of them are."""
ROWS = (
    Row("help", "optkit --help"),
    Row("plan", "optkit plan llama_int4"),
    Row("gptq, one block", f"optkit run llama_int4 {QUIET} {ONE_BLOCK} --set evals=[]"),
    Row("rtn, decode on a CPU", f"optkit run llama_int4_rtn {QUIET} {SPEED}", "decode_tokens_per_s"),
    Row("rtn, prompts on a CPU", f"optkit run llama_int4_rtn {QUIET} {SPEED}", "prefill_tokens_per_s"),
    Row("gptq on a GPU", f"optkit run llama_int4 {QUIET} --set evals=[] --device cuda", device="cuda"),
    Row(
        "gptq, decode on a GPU",
        f"optkit run llama_int4_cuda_graphs {QUIET} {SPEED} --device cuda",
        "decode_tokens_per_s",
        "cuda",
    ),
)
Timer = Callable[[str], tuple[float, str]]
"""Runs a command: its seconds, and what it printed."""


def timed(command: str) -> tuple[float, str]:
    """Run a command of this environment once, and return its wall clock and stdout."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        program, *words = (word.replace("SCRATCH", scratch) for word in shlex.split(command))
        called = [str(Path(sys.executable).with_name(program)), *words]
        started = time.perf_counter()
        done = subprocess.run(called, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        wall = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr[-2000:]}")
    return wall, done.stdout


def seconds(row: Row, wall: float, printed: str) -> float:
    """Return what a row took: the seconds of its command, or those of a token."""
    if not row.metric:
        return wall
    metrics = (each["metric"] for each in json.loads(printed)["rows"])
    return 1 / float(next(metric["value"] for metric in metrics if metric["name"] == row.metric))


def compared(samples: Sequence[float], earlier: Sequence[Sequence[float]]) -> Estimate | None:
    """Return how many times as long a row takes as it did, None if it never ran here.

    samples: seconds of this run; earlier: those of its earlier ones, the oldest first. The interval
    is that of one more run of the same program (t, in the logarithm), once there are two earlier
    ones; of one, both runs' own spread makes it.
    """
    runs = [math.log(mean(each)) for each in earlier[-RECENT:]]
    if not runs:
        return None
    if len(runs) == 1:
        return independent_ratio(*(mean_estimate(each, least=min(each) / 2) for each in (samples, earlier[-1])))
    change = math.log(mean(samples)) - mean(runs)
    half = t_quantile(len(runs) - 1) * standard_error(runs) * math.sqrt(len(runs) + 1)
    return Estimate(math.exp(change), (math.exp(change - half), math.exp(change + half)))


def measured(
    rows: Iterable[Row], repeats: int, history: Path, about: Mapping[str, Mapping[str, Any]], accept: bool, timer: Timer
) -> list[str]:
    """Time rows in turns, print each beside its history, and write it there. Return what is slower.
    about: of each kind of device, what is written with its rows; `device` names it.
    """
    chosen = [row for row in rows if row.device in about]
    samples: dict[str, list[float]] = {row.name: [] for row in chosen}
    for turn in range(1, repeats + 1):
        outputs: dict[str, tuple[float, str]] = {}
        for command in dict.fromkeys(row.command for row in chosen):
            print(f"turn {turn} of {repeats}: {command}", file=sys.stderr, flush=True)
            outputs[command] = timer(command)
        for row in chosen:
            samples[row.name].append(seconds(row, *outputs[row.command]))
    lines = history.read_text(encoding="utf-8").splitlines() if history.exists() else []
    slower = []
    for row in chosen:
        told = {"row": row.name, "command": row.command, **about[row.device], "seconds": samples[row.name]}
        same = ("row", "command", "device")
        earlier = [each["seconds"] for each in map(json.loads, lines) if all(each[key] == told[key] for key in same)]
        ratio = compared(samples[row.name], earlier)
        low, high = (ratio.interval if ratio else None) or (1.0, 1.0)
        print(
            f"{row.name}: {mean(samples[row.name]):.4g} s"
            + (
                f", {ratio.value:.2f} times [{low:.2f}, {high:.2f}] what it took before; earlier runs: {len(earlier)}"
                if ratio
                else ", the first run here"
            )
        )
        if low > LEAST:
            slower.append(row.name)
        if accept or low <= LEAST:
            with history.open("a", encoding="utf-8") as file:
                file.write(json.dumps(told) + "\n")
    return slower


def told_of(device: str) -> dict[str, Any]:
    """Return what is written with each row: the device, when, and the versions."""
    found = describe_environment(device)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "device": f"{found['device_name']}, {found['cpu_threads']} CPU threads",
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        "commit": commit.stdout.strip(),
        "versions": {name: found[name] for name in ("python", *PACKAGES) if name in found},
    }


def main() -> None:
    """Print each row, and exit with 1 if one is slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help=f"rows, as a glob pattern: {'; '.join(row.name for row in ROWS)}")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each row, 2 or more")
    parser.add_argument("--history", type=Path, default=HISTORY, help="the file of earlier runs")
    parser.add_argument("--accept", action="store_true", help="write down what is slower too")
    asked = parser.parse_args()
    if asked.repeats < 2:
        parser.error("--repeats: a run alone has no spread. Give 2 or more.")
    about = {device.partition(":")[0]: told_of(device) for device in {"cpu", best_device()}}
    here = [row for row in ROWS if row.device in about]
    rows = [row for row in here if fnmatch(row.name, asked.only)]
    if not rows:
        names = "; ".join(row.name for row in here)
        parser.error(f"--only: no row for {' or '.join(sorted(about))} is named {asked.only}. There are: {names}.")
    if waiting := [row.name for row in ROWS if row not in here and fnmatch(row.name, asked.only)]:
        print(f"not timed, for there is no NVIDIA GPU here: {'; '.join(waiting)}")
    if (load := os.getloadavg()[0]) > BUSY * (os.cpu_count() or 1):
        print(f"note: {load:.1f} programs wait for {os.cpu_count()} cores. Times of a busy machine say little.")
    if slower := measured(rows, asked.repeats, asked.history, about, asked.accept, timed):
        raise SystemExit(f"slower than before: {'; '.join(slower)}. If it is meant, --accept writes it down.")
    print(f"nothing is slower than before; written to {asked.history}")


if __name__ == "__main__":
    main()
