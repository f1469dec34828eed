"""`python -m tests.zoo [--models NAME ...] [--stages NAME ...]`: run cells, and write them into
docs/understand/models.json as each model is through; 1 if one crashed or differs in silence.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import bitsandbytes  # noqa: F401  # here, so that each model's process finds them imported
import compressed_tensors  # noqa: F401
import onnxruntime  # noqa: F401
import onnxscript  # noqa: F401
import peft  # noqa: F401
import torch._dynamo  # noqa: F401
from transformers.utils import logging

from tests.zoo.cells import BAD, CRASHED, UNTRIED, cell
from tests.zoo.configs import kinds
from tests.zoo.models import plain_logits, save_model
from tests.zoo.stages import STAGES
from tests.zoo.table import TABLE, Table

SECONDS = 1800
"""For all cells of a model; a process that needs longer hangs."""
ROW, ERRORS = "row.jsonl", "stderr.txt"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="zoo", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=[*kinds()], default=[*kinds()], metavar="NAME")
    parser.add_argument("--stages", nargs="+", choices=[*STAGES], default=[*STAGES], metavar="NAME")
    parser.add_argument("--missing", action="store_true", help="leave out cells that the table has")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="models at once, in the order of --models")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then, with the cells that there are")
    parser.add_argument("--dry", action="store_true", help="leave the table as it is")
    asked = parser.parse_args(arguments)
    end = time.monotonic() + asked.seconds
    table = Table.read()
    had = {kind: table.rows.get(kind, {}) if asked.missing else {} for kind in asked.models}
    todo = {kind: [stage for stage in asked.stages if stage not in had[kind]] for kind in asked.models}
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="optkit-zoo-") as made:
        for kind, found in _rows({kind: each for kind, each in todo.items() if each}, Path(made), asked.workers, end):
            row = {stage: (mark, said) for stage, mark, said in found if mark != UNTRIED}
            for stage, (mark, said) in row.items():
                counts[mark] += 1
                if mark in BAD:
                    sys.stdout.write(f"{kind:22} {stage:24} {mark}: {said}\n")
                    sys.stdout.flush()
            if not asked.dry:
                table.add(kind, row)
                table.write()
    counted = ", ".join(f"{count} {mark}" for mark, count in sorted(counts.items()))
    untried = sum(map(len, todo.values())) - counts.total()
    sys.stdout.write(f"{counted}, {untried} not tried ({TABLE})\n")
    return int(any(counts[mark] for mark in BAD))


def _rows(todo: dict[str, list[str]], made: Path, workers: int, end: float) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield each model and its cells as a process of its own finds them, in the order in which they end."""
    waiting, running = list(todo), dict[str, tuple[Any, float]]()
    while running or (waiting and time.monotonic() < end):
        while waiting and len(running) < workers and time.monotonic() < end:
            (place := made / (kind := waiting.pop(0))).mkdir()
            (place / ROW).touch()
            process = multiprocessing.get_context("fork").Process(target=_fill, args=(kind, todo[kind], place))
            process.start()
            running[kind] = process, min(end, time.monotonic() + SECONDS)
        wait([process.sentinel for process, _ in running.values()], timeout=1)
        for kind, (process, limit) in list(running.items()):
            if time.monotonic() > limit:
                process.kill()
                process.join()
            if not process.is_alive():
                del running[kind]
                found = [json.loads(line) for line in (made / kind / ROW).read_text().splitlines()]
                if process.exitcode and len(found) < len(todo[kind]) and time.monotonic() < end:
                    last = (made / kind / ERRORS).read_text(errors="replace").strip().rpartition("\n")[2][:200]
                    found.append(
                        [todo[kind][len(found)], CRASHED, f"the process ended with {process.exitcode}: {last}"]
                    )
                shutil.rmtree(made / kind, ignore_errors=True)
                yield kind, found


def _fill(kind: str, stages: list[str], place: Path) -> None:
    """Write down each cell of a model before the next begins."""
    warnings.simplefilter("ignore")
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    sys.stderr = (place / ERRORS).open("w")
    with (place / ROW).open("w", encoding="utf-8") as rows:
        try:
            plain_logits(source := save_model(kind, place / "model"))
        except Exception as error:  # an architecture that has no tiny model is told apart in the table
            said = f"no model: {type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
            rows.writelines(json.dumps([stage, "none", said]) + "\n" for stage in stages)
            return
        for number, stage in enumerate(stages):
            (desk := place / str(number)).mkdir()
            rows.write(json.dumps([stage, *cell(source, stage, desk)]) + "\n")
            rows.flush()
            shutil.rmtree(desk)


if __name__ == "__main__":
    sys.exit(main())
