"""8-bit artifacts, opened by optkit and by transformers with compressed-tensors: the same model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from optkit.session import open_session
from optkit.stage import Transform
from optkit.stages.fp8 import Fp8
from optkit.stages.smoothquant import SmoothQuant
from tests.conftest import TinyModel
from tests.support.running import run_stage

pytestmark = pytest.mark.peers
TEXT: Any = {"dataset": "python-reference", "samples": 6, "sequence_length": 64}


@pytest.mark.parametrize(
    ("kind", "stage", "tolerance"),
    [
        ("llama", Fp8(), 1e-4),
        ("llama", Fp8(scales="tensor"), 1e-3),
        ("llama", Fp8(activations="none"), 1e-4),
        ("llama", Fp8(scales="tensor", activations="static", calibration=TEXT), 1e-4),
        ("llama", SmoothQuant(calibration=TEXT), 0.02),  # a code that flips at a tie
        ("llama", SmoothQuant(activations="static", calibration=TEXT), 0.02),  # the same
        ("qwen2", Fp8(), 1e-4),
        ("gemma3", Fp8(), 1e-4),
        # compressed-tensors gives tokens in two dimensions (the feed-forward of OPT, experts) one
        # scale for all of them; vLLM does not
        ("opt", Fp8(activations="static", calibration=TEXT), 1e-4),
        ("opt", SmoothQuant(activations="static", calibration=TEXT), 1e-4),
        # transformers opens experts in bfloat16, their inputs never rounded
        ("mixtral", Fp8(activations="none"), 5e-3),
    ],
)
def test_transformers_gives_the_same_logits(
    kind: str, stage: Transform, tolerance: float, tiny_model: TinyModel, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    run_stage(stage, tiny_model(kind), tmp_path / "eight")
    tokens = torch.arange(40, 90)[None]
    ours = open_session(tmp_path / "eight").logits(tokens)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "eight").eval()
    with torch.no_grad():
        theirs = model(tokens).logits.float()
    assert float((ours - theirs).norm() / theirs.norm()) < tolerance
