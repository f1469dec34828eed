"""Has a row become slower than its own history on this device? `make bench`.

    python -m docs.benchmarks.suite [--only PATTERN] [--history FILE] [--accept]

Each row is a command, run several times in turns with the others. The fastest run counts, and is
compared with those of earlier calls on the same device with the same versions, in history.jsonl. A
row is slower if the whole 95% interval of the ratio lies above 1.03: that of one more call, by the
spread of the earlier ones. Exit status 1 names it, and it is not written into the history unless
`--accept` says that it is meant. Then, and if it became faster, its history begins anew. A row of
which other programs disturbed every run is neither judged nor written.
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

from optkit.common.statistics import Estimate, mean, standard_error, t_quantile
from optkit.devices.cpu_watch import CpuWatch
from optkit.environment import PACKAGES, best_device, describe_environment

ROOT = Path(__file__).parents[2]
HISTORY = Path(__file__).with_name("history.jsonl")
LEAST = 1.03
"""A smaller loss of time is none, however little the runs differ."""
RECENT = 10
"""Earlier calls that are looked at."""
FEWEST = 3
"""Earlier calls from which on a row is judged: the spread of two says too little."""
CALM = 0.1
"""Share of the cores that other programs may use in the calmest run of a row. The run that counts took no longer."""


@dataclass(frozen=True)
class Row:
    """One thing that is timed."""

    name: str
    command: str
    """SCRATCH stands for a new directory, in which nothing is finished yet."""
    metric: str = ""
    """Of the scorecard that the command prints, a rate; without it the command's wall clock counts."""
    device: str = "cpu"
    runs: int = 2


QUIET = "--json --quiet --store SCRATCH/store --out SCRATCH/made --set gates={}"
ONE_BLOCK = "--set 'stages.0.gptq.include=[\"*.layers.0.*\"]' --set stages.0.gptq.calibration.samples=16"
SPEED = (
    "--set attribution=false --set 'evals=[{throughput: {batch_sizes: [1], prompts: [128], new_tokens: 16, "
    "processes: 2, repeats: 2, warmup: 1, interval: 0.2, limit_s: 4}}]'"
)
"""Short: how far calls of the suite are apart says more than how far repeats of one of them are."""
GRAPH = "--set 'stages=[{rtn: {bits: 4, group_size: 32, symmetric: false}}, {precision: bf16}, cuda_graphs]'"
"""The shipped model is float32, of which no step is one graph."""
ROWS = (
    Row("help", "optkit --help", runs=6),
    Row("plan", "optkit plan llama_int4", runs=6),
    Row("gptq, one block", f"optkit run llama_int4 {QUIET} {ONE_BLOCK} --set evals=[]"),
    Row("rtn, decode on a CPU", f"optkit run llama_int4_rtn {QUIET} {SPEED}", "decode_tokens_per_s"),
    Row("rtn, prompts on a CPU", f"optkit run llama_int4_rtn {QUIET} {SPEED}", "prefill_tokens_per_s"),
    Row("gptq on a GPU", f"optkit run llama_int4 {QUIET} --set evals=[] --device cuda", device="cuda"),
    Row(
        "rtn, decode on a GPU",
        f"optkit run llama_int4_rtn {QUIET} {GRAPH} {SPEED} --device cuda",
        "decode_tokens_per_s",
        "cuda",
    ),
)
SLOWER, FASTER, DISTURBED, UNKNOWN, KEPT = "slower", "faster", "disturbed", "not judged yet", "not slower"
SAME = ("row", "command", "device", "versions")
"""What calls have in common that are compared."""
ANEW = "anew"
"""Of a call: what was before it is compared no more."""
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


def compared(seconds: float, earlier: Sequence[float]) -> Estimate | None:
    """Return how many times as long a row takes as it did, None if too few calls are known.

    seconds: of this call; earlier: of earlier ones, the oldest first. The interval is that of one
    more call of the same program (t, in the logarithm).
    """
    if len(earlier) < FEWEST:
        return None
    calls = [math.log(each) for each in earlier[-RECENT:]]
    change = math.log(seconds) - mean(calls)
    half = t_quantile(len(calls) - 1) * standard_error(calls) * math.sqrt(len(calls) + 1)
    return Estimate(math.exp(change), (math.exp(change - half), math.exp(change + half)))


def measured(
    rows: Iterable[Row], history: Path, about: Mapping[str, Mapping[str, Any]], accept: bool, timer: Timer
) -> dict[str, list[str]]:
    """Time rows in turns, print each beside its history, and write it there unless it is slower or
    was disturbed. Return the names of rows by verdict: SLOWER, DISTURBED, UNKNOWN or KEPT.
    about: of each kind of device, what is written with its rows; `device` names it.
    """
    chosen = [row for row in rows if row.device in about]
    samples: dict[str, list[float]] = {row.name: [] for row in chosen}
    others: dict[str, float] = {}
    for turn in range(max(row.runs for row in chosen)):
        for command, runs in {row.command: row.runs for row in chosen if turn < row.runs}.items():
            print(f"run {turn + 1} of {runs}: {command}", file=sys.stderr, flush=True)
            watch = CpuWatch()
            before = watch.now()
            output = timer(command)
            others[command] = min(others.get(command, 1.0), watch.others(before))
            for row in chosen:
                if row.command == command:
                    samples[row.name].append(seconds(row, *output))
    lines = history.read_text(encoding="utf-8").splitlines() if history.exists() else []
    calls = [json.loads(line) for line in lines]
    verdicts: dict[str, list[str]] = {}
    for row in chosen:
        told = {"row": row.name, "command": row.command, **about[row.device], "seconds": samples[row.name]}
        verdict, why = judged(min(samples[row.name]), comparable(calls, told), others[row.command])
        print(f"{row.name}: {min(samples[row.name]):.4g} s, {verdict}: {why}.")
        verdicts.setdefault(verdict, []).append(row.name)
        if verdict != DISTURBED and (accept or verdict != SLOWER):
            with history.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**told, ANEW: verdict in (FASTER, SLOWER)}) + "\n")
    return verdicts


def comparable(calls: Iterable[Mapping[str, Any]], told: Mapping[str, Any]) -> list[float]:
    """Return the seconds of earlier calls that this one is compared with, the oldest first."""
    found: list[float] = []
    for call in calls:
        if all(call[key] == told[key] for key in SAME):
            found = [*([] if call.get(ANEW) else found), min(call["seconds"])]
    return found


def judged(seconds: float, earlier: Sequence[float], others: float) -> tuple[str, str]:
    """Return what is to be said of a row, and why.
    others: the share of the cores that other programs used, in the calmest run.
    """
    ratio = compared(seconds, earlier)
    low, high = (ratio.interval if ratio else None) or (1.0, 1.0)
    if others > CALM:
        return DISTURBED, f"other programs used {others:.0%} of the cores. Run it again when nothing else runs"
    if not ratio:
        return UNKNOWN, f"{len(earlier)} earlier calls with this device and these versions, {FEWEST} are needed"
    seen = LEAST * ratio.value / low - 1
    count = len(earlier[-RECENT:])
    why = f"{ratio.value:.2f} times as long as in {count} earlier calls, 95% interval [{low:.2f}, {high:.2f}]"
    verdict = SLOWER if low > LEAST else FASTER if high < 1 / LEAST else KEPT
    return verdict, f"{why}. Slowdowns from {seen:.0%} on are seen"


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
    parser.add_argument("--history", type=Path, default=HISTORY, help="the file of earlier runs")
    parser.add_argument("--accept", action="store_true", help="write down what is slower too")
    asked = parser.parse_args()
    about = {device.partition(":")[0]: told_of(device) for device in {"cpu", best_device()}}
    here = [row for row in ROWS if row.device in about]
    rows = [row for row in here if fnmatch(row.name, asked.only)]
    if not rows:
        names = "; ".join(row.name for row in here)
        parser.error(f"--only: no row for {' or '.join(sorted(about))} is named {asked.only}. There are: {names}.")
    if waiting := [row.name for row in ROWS if row not in here and fnmatch(row.name, asked.only)]:
        print(f"not timed, for there is no NVIDIA GPU here: {'; '.join(waiting)}")
    found = measured(rows, asked.history, about, asked.accept, timed)
    slower = found.get(SLOWER, [])
    if slower and not asked.accept:
        raise SystemExit(f"slower than before: {'; '.join(slower)}. If it is meant, --accept writes it down.")
    judged_rows = sum(len(found.get(verdict, [])) for verdict in (SLOWER, FASTER, KEPT))
    print(f"{judged_rows} of {len(rows)} rows were judged; slower than before: {'; '.join(slower) or 'none'}")


if __name__ == "__main__":
    main()
