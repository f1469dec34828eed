"""llm-compressor itself, in its own environment, prunes the very weights that optkit prunes if
both do what the papers say.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from optkit.backends.environments import Environments
from optkit.progress import SilentProgress
from optkit.source.calibration import Calibration
from optkit.stages.prune import Prune
from tests.conftest import TinyModel
from tests.support.running import run_stage

pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.timeout(1800)]
CALIBRATION = {"dataset": "python-reference", "samples": 16, "sequence_length": 64}
PAPER: dict[str, dict[str, Any]] = {"wanda": {}, "sparsegpt": {"refinements": 0, "equal_tokens": False}}
SCRIPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "pruning.py"


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the Python of llm-compressor's environment, built if it is not there; $OPTKIT_ENVS
    keeps it for the next run.
    """
    os.environ.setdefault("OPTKIT_ENVS", str(tmp_path_factory.mktemp("envs")))
    return str(Environments().require("llmcompressor", SilentProgress()).interpreter)


@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
@pytest.mark.parametrize("method", PAPER)
def test_the_same_weights_go(
    tiny_model: TinyModel, tmp_path: Path, interpreter: str, method: str, pattern: str
) -> None:
    source = tiny_model("qwen2")
    request = {
        "method": method,
        "mask_structure": "2:4" if pattern == "2:4" else "0:0",
        "model": str(source),
        "target": str(tmp_path / "theirs"),
        "tokens": Calibration.model_validate(CALIBRATION).tokens(source, None).tolist(),
        "device": "cpu",
    }
    (tmp_path / "theirs").mkdir()
    (tmp_path / "request.json").write_text(json.dumps(request), encoding="utf-8")
    subprocess.run(
        [interpreter, str(SCRIPT), "--worker", str(tmp_path / "request.json")], check=True, capture_output=True
    )
    run_stage(
        Prune.model_validate({"method": method, "pattern": pattern, "calibration": CALIBRATION, **PAPER[method]}),
        source,
        tmp_path / "ours",
    )
    ours, theirs = (load_file(tmp_path / whose / "model.safetensors") for whose in ("ours", "theirs"))
    for name, weight in ours.items():
        # llm-compressor's SparseGPT takes one weight more from each block of 128 inputs: all that
        # are not above a threshold.
        assert ((weight == 0) != (theirs[name] == 0)).float().mean() <= (
            0.002 if (method, pattern) == ("sparsegpt", "unstructured") else 0
        )
        assert torch.linalg.norm(weight - theirs[name]) <= (
            0.05 if pattern == "unstructured" else 1e-5
        ) * torch.linalg.norm(theirs[name])
