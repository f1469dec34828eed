"""Copies of a text with tokens that the unmodified model expects: drawn as transformers' own logits say."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from optkit.model.checkpoint import Checkpoint
from optkit.model.skeleton import Skeleton
from optkit.source.calibration import Calibration
from optkit.training import predicted_memory
from optkit.training.redrawn_text import redrawn
from tests.conftest import TinyModel
from tests.support.changes import changing
from tests.support.opened import transformers_logits

COPIES = 400


@pytest.mark.parametrize(("kind", "last"), [("llama", "model.norm.weight"), ("gpt2", "transformer.ln_f.weight")])
def test_tokens_are_drawn_from_what_the_model_expects_there(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, kind: str, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shutil.copytree(tiny_model(kind), tmp_path / "source"))
    with changing(source) as tensors:
        tensors[last] *= 30  # else it expects all tokens alike
    tokens = text.tokens(source, None)[:3, :8]
    logits: Tensor = transformers_logits(source, tokens, dtype=torch.float32)
    monkeypatch.setattr(predicted_memory, "LOGIT_BYTES", {"cpu": 4 * logits.shape[-1] * 5})  # few at once
    skeleton = Skeleton(Checkpoint(source))
    copies = redrawn(skeleton, tokens, COPIES, "cpu", 2, 0, "").view(COPIES, *tokens.shape)
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    assert (copies[..., 0] == tokens[:, 0]).all()
    found = torch.nn.functional.one_hot(copies[..., 1:], logits.shape[-1]).float().mean(0)
    kept = torch.nn.functional.one_hot(tokens[:, 1:], logits.shape[-1])
    wanted = (logits[:, :-1].softmax(-1) + kept) / 2
    assert logits.softmax(-1).amax(-1).mean() > 0.1
    assert ((found - wanted).abs() < 5 * (wanted * (1 - wanted) / COPIES).sqrt() + 1e-2).all()  # five deviations
    assert (redrawn(skeleton, tokens, 2, "cpu", 2, 0, "") == redrawn(skeleton, tokens, 2, "cpu", 2, 0, "")).all()
