"""Short trainings of adapters on random letters, and recipes with one."""

from pathlib import Path
from typing import Any

import torch

from optkit.stage import Context, Report
from tests.support.running import run_stage

LENGTH = 32
RECOVER = "lora_recover: {texts: [python-reference]}"


def short_training(directory: Path) -> dict[str, Any]:
    """Return the fields of a short training on random letters."""
    letters = torch.randint(97, 123, (8_000,), generator=torch.Generator().manual_seed(0)).tolist()
    (directory / "letters.txt").write_text("".join(map(chr, letters)), encoding="utf-8")
    text = {"dataset": str(directory / "letters.txt")}
    length = {"sequence_length": LENGTH, "batch_size": 4, "tokens": 12 * 4 * LENGTH}
    return {
        "texts": [text],
        **length,
        "held_out": 4,
        "evaluations": 3,
        "precision": "float32",
        "rank": 4,
        "alpha": 8,
        "learning_rate": 2e-3,
    }


def run(stage: Any, source: Path, target: Path, origin: Path | None = None) -> Report:
    return run_stage(stage, source, target, Context(origin=origin or source))


def recipe(tmp_path: Path, model: Path, *stages: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"description: d\nmodel: {model}\nstages:\n" + "".join(f"  - {stage}\n" for stage in stages))
    return path
