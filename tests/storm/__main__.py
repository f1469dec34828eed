"""`python -m tests.storm [--only FAMILY ...] [--cases N] [--seed N] [--workers N] [--keep DIR]`: a
table, and 1 if anything failed.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tests.storm.broken_runs import kills, signals, together
from tests.storm.desk import Family, make_model, open_desk, run_in_peace
from tests.storm.forked import preload
from tests.storm.inputs import inputs

FAMILIES: dict[str, Family] = {"inputs": inputs, "kills": kills, "signals": signals, "together": together}
SHOWN = 40


def main(arguments: list[str] | None = None) -> int:
    """Run the storm and return 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="storm", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*FAMILIES], default=[*FAMILIES])
    parser.add_argument("--cases", type=int, help="of each family, as many as it has by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="families at once")
    parser.add_argument("--keep", type=Path, help="a directory for what the cases that failed left")
    asked = parser.parse_args(arguments)
    preload()
    with tempfile.TemporaryDirectory(prefix="optkit-storm-", ignore_cleanup_errors=True) as made:
        place = asked.keep or Path(made)
        place.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("XDG_CACHE_HOME", str(place / "cache"))
        make_model(place / "model")
        seconds = run_in_peace(place)
        found = _all(
            asked.only, asked.workers, lambda name: _start(name, place, asked.cases, asked.seed, seconds), place
        )
    return _show(found)


def _all(families: list[str], workers: int, start: Callable[[str], int], place: Path) -> dict[str, dict[str, object]]:
    """Run the families, so many at once, each in a process of its own; what they found, by name."""
    waiting, running = list(families), {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                name = waiting.pop(0)
                running[start(name)] = name
            pid, status = os.wait()
            if (name := running.pop(pid, "")) and status:
                (place / f"{name}.json").write_text(
                    json.dumps({"cases": 0, "failures": ["the storm itself failed"], "seconds": 0.0})
                )
    finally:
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return {name: json.loads((place / f"{name}.json").read_text(encoding="utf-8")) for name in families}


def _start(name: str, place: Path, cases: int | None, seed: int, seconds: float) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        root = place / name
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        (root / "model").symlink_to(place / "model")
        desk, started = open_desk(root, f"{seed} {name}", seconds), time.monotonic()
        FAMILIES[name](desk, cases)
        told = {"cases": desk.cases, "failures": desk.failures, "seconds": time.monotonic() - started}
        (place / f"{name}.json").write_text(json.dumps(told), encoding="utf-8")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _show(found: dict[str, dict[str, object]]) -> int:
    failed = 0
    for name, told in found.items():
        failures = told["failures"]
        assert isinstance(failures, list)
        failed += len(failures)
        for line in failures[:SHOWN]:
            _say(f"{name}: {line}")
    _say(f"{'family':10} {'cases':>6} {'failures':>9} {'seconds':>8}")
    for name, told in found.items():
        _say(f"{name:10} {told['cases']:6} {len(told['failures']):9} {told['seconds']:8.0f}")  # type: ignore[arg-type]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
