"""Finished blocks bring hidden states back to where they were, by what was made of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from optkit.model import kept_blocks
from optkit.model.checkpoint import Checkpoint
from optkit.model.kept_blocks import KeptBlocks
from optkit.progress import SilentTask
from optkit.source.calibration import Calibration
from optkit.stage import Transform
from optkit.stages.awq import Awq
from optkit.stages.gptq import Gptq
from optkit.stages.mx import Mx
from tests.conftest import TinyModel
from tests.model.test_kept_blocks import STAGES, Lines, few, files, interrupted, run

__all__ = ["few"]
FORMS: dict[str, Callable[[Calibration], Transform]] = {
    "3 bits with zero points": lambda text: Gptq(bits=3, group_size=32, symmetric=False, calibration=text),
    "gptq, in its own format": lambda text: Gptq(group_size=32, format="gptq", calibration=text),
    "balanced": lambda text: Gptq(group_size=32, effort="balanced", calibration=text),
    "awq, in its own format": lambda text: Awq(
        group_size=32, grid_points=2, format="awq", symmetric=False, calibration=text
    ),
    "nvfp4": lambda text: Mx(type="nvfp4", rounding="gptq", activations="none", calibration=text),
}


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_goes_on_as_on_a_gpu(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_blocks, "writes_states", lambda size, on_gpu: False)
    stage, source = FORMS[form](few), tiny_model("llama bfloat16")
    run(stage, source, tmp_path / "whole", None)
    work = interrupted(stage, source, tmp_path, 2)
    assert sorted(path.name for path in work.iterdir() if path.suffix != ".json") == [
        "block-00000.safetensors",
        "block-00001.safetensors",
    ]
    made, keep = list[int](), KeptBlocks._keep
    monkeypatch.setattr(KeptBlocks, "_keep", lambda self, *each: (made.append(each[1]), keep(self, *each))[1])
    bars, lines = list[tuple[str, int, str]](), Lines()
    monkeypatch.setattr(lines, "task", lambda *asked: (bars.append(asked), SilentTask())[1])
    run(stage, source, tmp_path / "resumed", work, lines)
    assert (f"{stage.kind}: text through finished blocks", 2, "blocks") in bars
    assert made == [2]
    assert files(tmp_path / "resumed") == files(tmp_path / "whole")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*STAGES, *FORMS])
def test_a_gpu_goes_on(
    tiny_model: TinyModel, tmp_path: Path, few: Calibration, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_blocks, "writes_states", lambda size, on_gpu: False)
    stage, source = (STAGES | FORMS)[kind](few), tiny_model("llama bfloat16")
    run(stage, source, tmp_path / "whole", None, device="cuda")
    work = interrupted(stage, source, tmp_path, 1, "cuda")
    run(stage, source, tmp_path / "resumed", work, device="cuda")
    assert files(tmp_path / "resumed") == files(tmp_path / "whole")


def test_the_plan_counts_states_where_they_are_written(tiny_model: TinyModel, few: Calibration) -> None:
    stage, shape = Gptq(calibration=few, group_size=32), Checkpoint(tiny_model("llama")).shape
    large = few.model_copy(update={"samples": 1 << 20})
    on_cpu, on_gpu = (
        stage.model_copy(update={"calibration": large}).predict(shape, each)[0] for each in ("cpu", "cuda")
    )
    states = (1 << 20) * 64 * shape.config["hidden_size"] * 4
    assert on_cpu.kept_bytes - on_gpu.kept_bytes == 2 * states
    assert stage.predict(shape, "cpu")[0].kept_bytes == stage.predict(shape, "cuda")[0].kept_bytes
