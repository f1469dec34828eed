"""Encoders are quantized and pruned, and plain transformers opens what is written."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from optkit_evals.embedding import Embedding
from optkit_evals.encoding import Encoding
from safetensors.torch import load_file, save_file

from optkit.errors import StageError
from optkit.measure import EvalContext
from optkit.model.checkpoint import Checkpoint
from optkit.model.formats.base import Format
from optkit.session import open_session
from optkit.source.calibration import Calibration
from optkit.stages.fp8 import Fp8
from optkit.stages.int8 import Int8
from optkit.stages.prune import Prune
from optkit.stages.rtn import Rtn
from optkit.verification.model_files import model_files
from tests.conftest import TinyModel
from tests.support.running import run_stage

TEXT = Calibration(dataset="python-reference", samples=4, sequence_length=48)
STAGES: dict[str, Callable[[], Any]] = {
    "rtn": lambda: Rtn(group_size=32),
    "fp8": lambda: Fp8(),
    "int8": lambda: Int8(),
    "prune": lambda: Prune(method="wanda", calibration=TEXT),
    "prune by magnitude": lambda: Prune(method="magnitude"),
}
TEXTS = ["The cat sat.", "A loop runs until it ends, or until something in it says that it should."]


@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("architecture", ["BertModel", "BertForSequenceClassification", "DistilBertModel"])
def test_plain_transformers_computes_the_same(
    tiny_encoder_source: TinyModel, tmp_path: Path, architecture: str, kind: str
) -> None:
    if kind == "int8":
        pytest.importorskip("bitsandbytes")
    source, target = tiny_encoder_source(architecture), tmp_path / "made"
    stage = STAGES[kind]()
    _, left = stage.predict(Checkpoint(source).shape, "cpu")
    report = run_stage(stage, source, target)
    assert left.tensors == Checkpoint(target).shape.tensors
    assert report.changed == 12
    assert [check.detail for check in model_files(Format.of(target), target).checks() if not check.ok] == []
    session: Any = open_session(target)
    tokens, mask = session.tokenize(TEXTS)
    ours = session.outputs(tokens, mask)
    plain = getattr(transformers, architecture).from_pretrained(target, dtype="auto").eval()
    with torch.no_grad():
        theirs = plain(input_ids=tokens, attention_mask=mask)[0].float()
    seen = mask.bool() if theirs.dim() == 3 else slice(None)
    limit = 0.1 if kind == "int8" else 2e-3  # bitsandbytes multiplies in 16 bits
    assert torch.allclose(ours[seen], theirs[seen], atol=limit, rtol=1e-2)


def test_an_encoder_without_its_pooler(tiny_encoder_source: TinyModel, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_encoder_source("BertModel"), tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if not name.startswith("pooler")},
        source / "model.safetensors",
        metadata={"format": "pt"},
    )
    target = tmp_path / "made"
    run_stage(Rtn(group_size=32), source, target)
    session, before = open_session(target), open_session(source)
    found = {
        metric.name: metric.value
        for metric in Embedding(dataset="python-reference", sentences=12).run(session, EvalContext(baseline=before))  # type: ignore[arg-type]
    }
    assert 0.9 < found["cosine_similarity"] < 1
    timed = Encoding(batch_sizes=(1,), lengths=(8,), calls=2).run(session, EvalContext())  # type: ignore[arg-type]
    assert {metric.name for metric in timed} >= {"latency_p50_s", "sequences_per_s"}


def test_no_output_layer_is_asked_for(tiny_encoder_source: TinyModel) -> None:
    with pytest.raises(StageError, match="rtn.lm_head: the model has no layer lm_head"):
        Rtn(group_size=32, lm_head=True).predict(Checkpoint(tiny_encoder_source("BertModel")).shape, "cpu")
