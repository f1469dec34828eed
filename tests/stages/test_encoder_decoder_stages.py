"""Both halves of encoder-decoders are quantized, and plain transformers opens what is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.companions import find_companions
from optkit.model.formats.base import Format
from optkit.model.task import loader_of
from optkit.session import open_session
from optkit.stage import Context
from optkit.stages.cast import Cast
from optkit.stages.fp8 import Fp8
from optkit.stages.nf4 import Nf4
from optkit.stages.rtn import Rtn
from optkit.verification.model_files import model_files
from tests.conftest import TinyModel

STAGES: dict[str, Callable[[], Any]] = {
    "cast": lambda: Cast(dtype="bfloat16"),
    "rtn": lambda: Rtn(group_size=32),
    "fp8": lambda: Fp8(),
    "nf4": lambda: Nf4(),
}
TOKENS = torch.tensor([[2, 40, 50, 60, 70]])
LAYERS = {
    "T5ForConditionalGeneration": 2 * (4 + 3) + 2 * (8 + 3),
    "BartForConditionalGeneration": 2 * 6 + 3 * 10,
    "WhisperForConditionalGeneration": 2 * 6 + 3 * 10,
}


def inputs_of(directory: Path) -> dict[str, Any]:
    config = Checkpoint(directory).config
    if bins := config.get("num_mel_bins"):
        return {"input_features": torch.randn(1, bins, 100, generator=torch.Generator().manual_seed(0))}
    return {"input_ids": torch.arange(10, 30)[None]}


def opened_plainly(directory: Path) -> Any:
    loader = getattr(transformers, loader_of(Checkpoint(directory).config))
    model, report = loader.from_pretrained(directory, dtype="auto", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    return model.eval()


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [(each, kind) for each in LAYERS for kind in STAGES if not (kind == "rtn" and each.startswith("T5"))],
)
def test_plain_transformers_computes_the_same(
    tiny_encoder_decoder: TinyModel, tmp_path: Path, architecture: str, kind: str
) -> None:
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    source, target = tiny_encoder_decoder(architecture), tmp_path / "made"
    target.mkdir()
    stage, before = STAGES[kind](), Checkpoint(source)
    _, left = stage.predict(before.shape, "cpu")
    report = stage.run(source, target, Context())
    after = Checkpoint(target)
    assert left.tensors.keys() == after.tensors.keys()
    assert left.size_bytes == pytest.approx(after.shape.size_bytes, rel=1e-2)
    assert set(find_companions(target).kept) == set(find_companions(source).kept)
    assert [check.detail for check in model_files(Format.of(target), target).checks() if not check.ok] == []
    if kind != "cast":
        read = [name for name, why in report.skipped.items() if "own code" in why]
        assert report.changed + len(read) == LAYERS[architecture]
    session: Any = open_session(target)
    inputs = {name: value.to(session.model.dtype) if value.is_floating_point() else value for name, value in
              inputs_of(source).items()}  # fmt: skip
    ours = session.logits_given(inputs, TOKENS)
    with torch.no_grad():
        theirs = opened_plainly(target)(**inputs, decoder_input_ids=TOKENS).logits.float()
    assert torch.allclose(ours, theirs, atol=2e-2 if kind == "cast" else 1e-3, rtol=1e-3)


def test_packed_layers_that_transformers_does_not_open_are_refused_by_the_plan(
    tiny_encoder_decoder: TinyModel,
) -> None:
    with pytest.raises(StageError, match="none of the 36 layers can be packed so .* fp8, int8 or nf4"):
        Rtn(group_size=32).predict(Checkpoint(tiny_encoder_decoder("T5ForConditionalGeneration")).shape, "cpu")
