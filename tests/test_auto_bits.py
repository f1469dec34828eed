"""Stage `auto_bits` on tiny models: budgets that are kept, choices that are offered, and what it says where it cannot work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div

from optkit.errors import StageError
from optkit.kernels.formats import quantized_layers
from optkit.kernels.load import load_packed
from optkit.model.checkpoint import Checkpoint
from optkit.model.skeleton import Skeleton
from optkit.progress import SilentProgress
from optkit.source.calibration import Calibration
from optkit.stage import Context, Report
from optkit.stages.auto_bits import AutoBits
from optkit.stages.bit_budget import Choice

TinyModel = Callable[[str], Path]


@pytest.fixture
def text(tmp_path: Path) -> Calibration:
    """Return a calibration text of random letters that comes from a file."""
    letters = torch.randint(97, 123, (20_000,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "letters.txt").write_text("".join(map(chr, letters)), encoding="utf-8")
    return Calibration(dataset=str(tmp_path / "letters.txt"), samples=12, sequence_length=64)


def quantize(source: Path, target: Path, **fields: Any) -> Report:
    target.mkdir()
    return AutoBits(**fields).run(source, target, Context())


def test_the_budget_is_kept_and_the_choice_is_better_than_any_single_one(tiny_model: TinyModel, tmp_path: Path, text: Calibration) -> None:
    report = quantize(tiny_model("llama"), tmp_path / "out", average_bits=6, calibration=text, held_out_samples=4)
    assert report.details["quantized_bits_per_weight"] <= 6
    predicted = report.details["predicted_divergence"]
    assert predicted["uniform"]
    assert all(predicted["chosen"] <= nats for nats in predicted["uniform"].values())
    assert report.calibrated_on == (text.identity(),)
    assert sum(report.details["counts"].values()) == len(report.details["choices"]) == report.changed
