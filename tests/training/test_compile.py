"""A training with torch.compile: the same losses, and no time of the training goes into compiling."""

from pathlib import Path
from typing import Any

import pytest
import torch

from optkit.stage import Context
from optkit.stages.distill import Distill
from optkit.stages.qat import Qat
from tests.conftest import TinyModel
from tests.support.running import run_stage

LENGTH = 16


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (4_000,), generator=generator).tolist()
    (tmp_path / "letters.txt").write_text("".join(map(chr, letters)), encoding="utf-8")
    shared = {
        "texts": [{"dataset": str(tmp_path / "letters.txt")}],
        "sequence_length": LENGTH,
        "batch_size": 4,
        "held_out": 4,
    }
    return shared | {
        "tokens": 6 * 4 * LENGTH,
        "evaluations": 2,
        "precision": "float32",
        "divergence": 0,
        "cross_entropy": 1,
    }


@pytest.mark.parametrize(
    ("stage", "backend"), [("qat", "aot_eager"), pytest.param("distill", "inductor", marks=pytest.mark.slow)]
)
def test_it_trains_as_without(
    tiny_model: TinyModel,
    tmp_path: Path,
    fields: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    backend: str,
) -> None:
    compile_ = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_(module, backend=backend))
    torch.compiler.reset()
    reports = {}
    for compiled in (False, True):
        training = {**fields, "compile": compiled, "learning_rate": 1e-3}
        made: Any = (
            Distill(**training) if stage == "distill" else Qat(bits=4, group_size=16, start="rtn", training=training)
        )
        reports[compiled] = run_stage(
            made, tiny_model("llama"), tmp_path / str(compiled), Context(origin=tiny_model("llama"))
        ).details
    plain, fast = reports[False], reports[True]
    assert dict(fast["curve"]) == pytest.approx(dict(plain["curve"]), rel=1e-4)
    assert fast["held_out_after"] == pytest.approx(plain["held_out_after"], rel=1e-4)
    assert plain["compile_seconds"] == 0 < fast["compile_seconds"]
    assert fast["tokens"] / fast["tokens_per_s"] < fast["compile_seconds"]
