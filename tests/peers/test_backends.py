"""The real libraries, in environments that are built here (network, minutes), quantize a tiny model
that optkit then opens.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from optkit.backends.environments import Environments
from optkit.model.checkpoint import Checkpoint
from optkit.progress import SilentProgress
from optkit.recipe.registry import stage_class
from optkit.session import open_session
from optkit.stage import Context
from tests.support.running import run_stage
from tests.support.tiny_models import CONFIGS, save_tiny_model

pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.timeout(1800)]
MIXED = {"exclude": ["*.0.mlp.*"], "overrides": {"*.v_proj": {"bits": 8}}}
CALIBRATION = {"dataset": "python-reference", "samples": 8, "sequence_length": 64}


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what is built for all of these tests; $OPTKIT_ENVS keeps it for the next run too."""
    os.environ.setdefault("OPTKIT_ENVS", str(tmp_path_factory.mktemp("envs")))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny llama whose layers all have multiples of 64 outputs, as AutoAWQ asks for, and
    whose positions turn slowly.
    """
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "wide", {**CONFIGS["llama"], "num_key_value_heads": 4, "rope_parameters": rope})
        return save_tiny_model("wide", tmp_path_factory.mktemp("wide"))


@pytest.mark.parametrize(
    ("kind", "fields", "method"),
    [
        ("gptq", {"backend": "gptqmodel", "calibration": CALIBRATION}, "gptq"),
        ("gptq", {"backend": "gptqmodel", "calibration": CALIBRATION, "earlier_errors": 0.25, **MIXED}, "gptq"),
        ("gptq", {"backend": "llmcompressor", "calibration": CALIBRATION, "symmetric": False}, "compressed-tensors"),
        ("rtn", {"backend": "llmcompressor", "overrides": {"*.v_proj": {"bits": 8}}}, "compressed-tensors"),
        ("rtn", {"backend": "torchao", "symmetric": False}, "compressed-tensors"),
        ("awq", {"backend": "autoawq", "calibration": CALIBRATION}, "awq"),
        ("gptq", {"backend": "auto_round", "learn": "blocks", "learning_steps": 5, "calibration": CALIBRATION}, "gptq"),
        ("awq", {"backend": "auto_round", "calibration": CALIBRATION}, "awq"),
        ("awq", {"backend": "gptqmodel", "calibration": CALIBRATION}, "awq"),
    ],
)
def test_a_library_quantizes_in_its_own_environment(
    kind: str, fields: dict[str, Any], method: str, wide: Path, tmp_path: Path
) -> None:
    report = (
        stage_class(kind).model_validate_json(json.dumps({"group_size": 32, **fields})).run(wide, tmp_path, Context())  # type: ignore[attr-defined]
    )  # type: ignore[attr-defined]
    assert report.details["backend"] == fields["backend"]
    assert report.details["logits_apart"] < 1e-3
    assert 4 < report.details["quantized_bits_per_weight"] < 6
    quantization = Checkpoint(tmp_path).quantization
    assert quantization is not None
    assert quantization["quant_method"] == method
    tokens = torch.randint(1, 500, (2, 40), generator=torch.Generator().manual_seed(0))
    there, here = open_session(tmp_path).logits(tokens), open_session(wide).logits(tokens)
    assert 0.01 < (there - here).norm() / here.norm() < 0.5


def test_rope_of_each_kind_of_layer_is_kept(tmp_path: Path) -> None:
    gemma = save_tiny_model("gemma3", tmp_path / "gemma")
    fields = {"group_size": 32, "backend": "gptqmodel", "calibration": CALIBRATION}
    target = tmp_path / "made"
    run_stage(stage_class("gptq").model_validate_json(json.dumps(fields)), gemma, target)  # type: ignore[attr-defined]
    there, here = (json.loads((path / "config.json").read_text())["rope_parameters"] for path in (target, gemma))
    assert there == here


@pytest.mark.parametrize("name", ["autoawq", "gptqmodel", "llmcompressor"])
def test_an_environment_has_our_torch_and_not_our_transformers(name: str) -> None:
    environment = Environments().require(name, SilentProgress())
    program = (
        "import torch, transformers, json; print(json.dumps([torch.__version__, transformers.__file__, "
        "torch.ones(2).sum().item()]))"
    )
    said = subprocess.run([environment.interpreter, "-c", program], capture_output=True, text=True, check=True)
    version, place, two = json.loads(said.stdout)
    assert version == torch.__version__
    assert Path(place).is_relative_to(environment.directory)
    assert two == 2
    check = subprocess.run([environment.interpreter, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    missing = [line for line in check.stdout.splitlines() if "triton" not in line and "zstandard" not in line]
    assert [line for line in missing if "requires" in line] == []
