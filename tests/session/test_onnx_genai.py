"""Generation by ONNX Runtime GenAI: the same tokens, timed and told in the same scorecard."""

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from optkit_evals.throughput import Throughput
from pydantic import ValidationError
from torch import Tensor

import optkit
from optkit.errors import EvalError, MissingPackageError, SourceError
from optkit.measure import EvalContext
from optkit.model.writer import copy_companions
from optkit.onnx import genai
from optkit.session import open_session
from optkit.session.onnx_session import OnnxSession
from optkit.settings.onnx_provider import OnnxProvider
from optkit.stage import Setting
from tests.support.changes import change_json

pytestmark = pytest.mark.usefixtures("children_here")
TinyOnnx = Callable[[str, str], Path]
GENAI: list[Setting] = [OnnxProvider(engine="onnxruntime-genai")]


@pytest.fixture
def exported(tiny_onnx: TinyOnnx, tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    directory = Path(shutil.copytree(tiny_onnx("llama", "fp32"), tmp_path / "onnx"))
    copy_companions(tiny_model("llama"), directory)
    return directory


def opened(directory: Path, settings: Sequence[Setting] = ()) -> OnnxSession:
    session = open_session(directory, settings)
    assert isinstance(session, OnnxSession)
    return session


def tokens_of(rows: int, length: int) -> Tensor:
    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("batch", [1, 3])
def test_the_tokens_are_those_of_onnx_runtime(exported: Path, batch: int) -> None:
    tokens = tokens_of(batch, 12)
    expected = opened(exported).generate(tokens, 40)
    session = opened(exported, GENAI)
    assert session.generate(tokens, 40).equal(expected)
    assert torch.stack(list(session.stream(tokens, 40)), 1).equal(expected[:, 12:])
    assert session.generate(tokens, 0).equal(tokens)


def test_it_never_stops_early(exported: Path) -> None:
    tokens = tokens_of(1, 12)
    answer = opened(exported).generate(tokens, 20)
    ends = answer[0, 12:].tolist()
    change_json(exported / "genai_config.json", lambda config: config["model"].update(eos_token_id=ends))
    assert opened(exported, GENAI).generate(tokens, 20).equal(answer)


def test_a_whole_session(exported: Path) -> None:
    session = opened(exported, [OnnxProvider(engine="onnxruntime-genai", threads=2)])
    assert (session.vocabulary, session.positions, session.dtype) == (512, 512, "float32")
    (note,) = session.notes
    assert note.startswith("onnxruntime-genai 0.")
    assert note.endswith("generates on cpu; logits are computed by onnxruntime itself")
    assert "runner" not in vars(session), "the model is in memory once while it generates"
    tokens = tokens_of(2, 30)
    assert session.logits(tokens).equal(opened(exported).logits(tokens))
    assert session.decode_bytes(1, 100) == opened(exported).decode_bytes(1, 100)
    metrics = Throughput(prompts=(16,), new_tokens=4, repeats=2).run(session, EvalContext())
    assert {metric.name for metric in metrics} >= {"decode_tokens_per_s", "prefill_tokens_per_s"}
    session.close()


def test_two_streams_at_once(exported: Path) -> None:
    session = opened(exported, GENAI)
    first, second = tokens_of(1, 9), tokens_of(2, 5)
    alone = [session.generate(first, 6)[:, 9:], session.generate(second, 6)[:, 5:]]
    pairs = list(zip(session.stream(first, 6), session.stream(second, 6), strict=True))
    assert [
        torch.stack(list(each), 1).equal(known) for each, known in zip(zip(*pairs, strict=True), alone, strict=True)
    ] == [True, True]


def test_no_genai_config(exported: Path) -> None:
    (exported / "genai_config.json").unlink()
    with pytest.raises(
        SourceError, match=r"there is no genai_config.json. ONNX Runtime GenAI reads there .* Export it with"
    ):
        opened(exported, GENAI)


def test_a_graph_that_is_none(exported: Path) -> None:
    change_json(exported / "genai_config.json", lambda config: config["model"].update(type="unheard-of"))
    with pytest.raises(SourceError, match="ONNX Runtime failed while it was opened. Unsupported model_type"):
        opened(exported, GENAI)


def test_more_tokens_than_positions(exported: Path) -> None:
    with pytest.raises(EvalError, match="515 tokens are more than the model's 512 positions"):
        opened(exported, GENAI).stream(tokens_of(1, 512), 3)


def test_no_package(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", None)
    with pytest.raises(
        MissingPackageError, match=r"`onnxruntime-genai` is not installed. Run: pip install 'optkit\[onnx\]'"
    ):
        opened(exported, GENAI)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_build_for_gpus(exported: Path) -> None:
    from optkit.onnx.directory import OnnxDirectory

    with pytest.raises(
        MissingPackageError,
        match=r"on cuda: the package `onnxruntime-genai-cuda` is not installed. Run: pip .*onnx-gpu",
    ):
        genai.GenaiModel(OnnxDirectory(exported), "cuda")


def test_fields_that_cannot_be() -> None:
    with pytest.raises(ValidationError, match="GenAI computes on the provider of the device: leave providers out"):
        OnnxProvider(engine="onnxruntime-genai", providers=("cpu",))
    with pytest.raises(ValidationError, match="it says nothing: set engine, providers or threads"):
        OnnxProvider(engine="onnxruntime")


def test_it_describes_itself_and_has_its_version_in_the_key() -> None:
    setting = OnnxProvider(engine="onnxruntime-genai", threads=8)
    assert setting.describe("cpu") == "onnx_provider: onnxruntime-genai; 8 threads"
    assert "onnxruntime-genai" in setting.made_with()["packages"]
    assert OnnxProvider(threads=8).made_with() == {}


def test_a_recipe_times_it(exported: Path, tmp_path: Path) -> None:
    recipe = {
        "name": "generated",
        "model": {"name": str(exported)},
        "stages": [{"onnx_provider": {"engine": "onnxruntime-genai"}}],
        "evals": [{"throughput": {"prompts": [16], "new_tokens": 4, "repeats": 2, "processes": 2}}],
    }
    scorecard = optkit.run(optkit.load_recipe(recipe), out=tmp_path / "out", store=tmp_path / "store", device="cpu")
    notes = [str(note) for note in scorecard.notes]
    assert any("onnxruntime-genai 0." in note for note in notes)
    assert all(row.baseline for row in scorecard.rows), "the unmodified model is timed by ONNX Runtime"
