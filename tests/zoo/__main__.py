"""`python -m tests.zoo [--models NAME ...] [--stages NAME ...]`: run cells, and write them into
docs/understand/models.json; 1 if one crashed or differs in silence.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import bitsandbytes  # noqa: F401  # here, so that each model's process finds them imported
import compressed_tensors  # noqa: F401
import peft  # noqa: F401
from transformers.utils import logging

from tests.zoo.cells import BAD, CRASHED, cell
from tests.zoo.configs import kinds
from tests.zoo.models import save_model
from tests.zoo.stages import STAGES
from tests.zoo.table import TABLE, Table

SECONDS = 1800
"""For all cells of a model; a process that needs longer hangs."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="zoo", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=[*kinds()], default=[*kinds()], metavar="NAME")
    parser.add_argument("--stages", nargs="+", choices=[*STAGES], default=[*STAGES], metavar="NAME")
    parser.add_argument("--workers", type=int, default=2, help="models at once")
    parser.add_argument("--dry", action="store_true", help="leave the table as it is")
    asked = parser.parse_args(arguments)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="optkit-zoo-") as made, ThreadPoolExecutor(asked.workers) as pool:
        rows = pool.map(lambda kind: _row(kind, asked.stages, Path(made) / kind), asked.models)
        for kind, row in zip(asked.models, rows, strict=True):
            for stage, (mark, said) in row.items():
                counts[mark] += 1
                if mark in BAD:
                    sys.stdout.write(f"{kind:22} {stage:24} {mark}: {said}\n")
                    sys.stdout.flush()
            if not asked.dry:
                table = Table.read()
                table.add(kind, row)
                table.write()
    counted = ", ".join(f"{count} {mark}" for mark, count in sorted(counts.items()))
    sys.stdout.write(f"{counted} ({TABLE})\n")
    return int(any(counts[mark] for mark in BAD))


def _row(kind: str, stages: list[str], place: Path) -> dict[str, tuple[str, str]]:
    """Return the cells of a model, each written down before the next begins, as a process of its own finds them."""
    place.mkdir()
    file = place / "row.jsonl"
    process = multiprocessing.get_context("fork").Process(target=_fill, args=(kind, stages, place, file))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    found = {stage: (mark, said) for stage, mark, said in map(json.loads, file.read_text().splitlines())}
    if process.exitcode and len(found) < len(stages):
        found[stages[len(found)]] = (CRASHED, f"the process ended with {process.exitcode}")
    return found


def _fill(kind: str, stages: list[str], place: Path, file: Path) -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    sys.stderr = (place / "stderr.txt").open("w")
    with file.open("w", encoding="utf-8") as rows:
        try:
            source = save_model(kind, place / "model")
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
