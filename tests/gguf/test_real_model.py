"""SmolLM2-135M: llama.cpp on a file of codes loses what optkit says of the codes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from optkit.session import open_session
from optkit.source.texts import TextSource
from optkit.stages.gguf import Gguf
from optkit.stages.rtn import Rtn
from tests.support.running import run_stage

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("symmetric", "kind"), [(True, "Q4_0"), (False, "Q4_1")])
def test_perplexity_is_that_of_the_codes(smol: Path, tmp_path: Path, symmetric: bool, kind: str) -> None:
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, of the extra `llama-cpp`")
    run_stage(Rtn(bits=4, group_size=32, symmetric=symmetric), smol, tmp_path / "codes")
    report = run_stage(Gguf(), tmp_path / "codes", tmp_path / "gguf")
    assert report.details["types"] == {kind: 210, "Q8_0": 1}
    assert report.details["divergence"] < 0.03
    ours, theirs = open_session(tmp_path / "codes"), open_session(tmp_path / "gguf")
    tokens = ours.encode(TextSource(dataset="python-reference").joined(None)[:20_000])[:2048].view(4, 512)
    assert theirs.encode("a 12").tolist() == ours.encode("a 12").tolist()

    def loss(logits: Tensor) -> float:
        return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))

    assert loss(theirs.logits(tokens)) == pytest.approx(loss(ours.logits(tokens)), abs=0.01)
