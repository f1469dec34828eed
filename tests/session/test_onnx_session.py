"""A session on ONNX Runtime is a session like torch's: evals see no difference."""

import gc
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from optkit_evals.divergence import Divergence
from optkit_evals.footprint import Footprint
from optkit_evals.perplexity import Perplexity
from optkit_evals.sensitivity import Sensitivity
from optkit_evals.throughput import Throughput
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from optkit.errors import EvalError, OptkitError, SourceError, StageError
from optkit.measure import EvalContext
from optkit.model.writer import copy_companions
from optkit.session import open_session
from optkit.session.onnx_session import NO_POSITIONS, OnnxSession
from optkit.session.torch_session import TorchSession
from optkit.stage import Format, Setting
from tests.support.fresh_python import imported_by
from tests.support.handmade_decoder import POSITIONS, VOCABULARY, expected, handmade
from tests.support.metric_values import values
from tests.support.near import near

TinyOnnx = Callable[[str, str], Path]
TEXT = {"dataset": "python-reference", "split": "test", "window": 64, "windows": 3}


def tokens_of(rows: int, length: int, vocabulary: int = 512) -> Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def exported(tiny_onnx: TinyOnnx, tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return the tiny llama as an artifact has it: the files of the source beside the graph."""
    directory = Path(shutil.copytree(tiny_onnx("llama", "fp32"), tmp_path / "onnx"))
    copy_companions(tiny_model("llama"), directory)
    return directory


def test_what_it_says_of_itself(exported: Path) -> None:
    session = open_session(exported)
    assert isinstance(session, OnnxSession)
    assert (session.directory, session.device, session.vocabulary, session.positions) == (exported, "cpu", 512, 512)
    assert session.dtype == "float32"
    (note,) = session.notes
    assert note.startswith("onnxruntime 1.")
    assert "computed by CPUExecutionProvider (" in note
    theirs = AutoTokenizer.from_pretrained(exported)("def f(x):")["input_ids"]
    assert session.encode("def f(x):").tolist() == theirs


def test_tokens_go_through_it_without_transformers(exported: Path) -> None:
    code = f"""import optkit.measuring.fresh_process_worker, torch; from optkit.session import open_session
session, tokens = open_session({str(exported)!r}), torch.arange(4)[None]
session.logits(tokens), session.generate(tokens, 2), session.close()"""
    loaded = imported_by(code)
    assert "transformers" not in loaded
    assert "onnxruntime" in loaded


@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_is_transformers_greedy(exported: Path, tiny_model: Callable[[str], Path], batch: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32)
    tokens = tokens_of(batch, 12)
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    theirs = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    session = open_session(exported)
    assert session.generate(tokens, 10).equal(theirs)
    assert torch.stack(list(session.stream(tokens, 10)), 1).equal(theirs[:, 12:])
    assert session.generate(tokens, 0).equal(tokens)


def test_logits_are_those_of_the_torch_session(exported: Path, tiny_model: Callable[[str], Path]) -> None:
    tokens = tokens_of(2, 70)
    ours, theirs = open_session(exported).logits(tokens), open_session(tiny_model("llama")).logits(tokens)
    assert ours.dtype == theirs.dtype == torch.float32
    assert near(ours, theirs)


def test_two_streams_at_once(exported: Path) -> None:
    session = open_session(exported)
    first, second = tokens_of(1, 9), tokens_of(2, 5)
    alone = [session.generate(first, 6)[:, 9:], session.generate(second, 6)[:, 5:]]
    together = [[], []]
    for one, other in zip(session.stream(first, 6), session.stream(second, 6), strict=True):
        together[0].append(one)
        together[1].append(other)
    assert all(torch.stack(found, 1).equal(known) for found, known in zip(together, alone, strict=True))


def test_a_stream_that_is_dropped_leaves_nothing(exported: Path) -> None:
    session = open_session(exported)
    stream = session.stream(tokens_of(1, 9), 6)
    next(stream)
    decoding = weakref.ref(stream.gi_frame.f_locals["decoding"])
    del stream
    gc.collect()
    assert decoding() is None


def test_a_graph_without_a_cache_generates_too(tmp_path: Path) -> None:
    cached, plain = (open_session(handmade(tmp_path / str(flag), cached=flag)) for flag in (True, False))
    tokens = tokens_of(2, 6, VOCABULARY)
    assert plain.generate(tokens, 8).equal(cached.generate(tokens, 8))
    assert plain.notes[1].startswith("onnxruntime: the graph has no KV cache")
    assert cached.notes[1].startswith("onnxruntime: the graph copies its KV cache at each token")
    assert near(plain.logits(tokens), expected(tokens))


def test_more_tokens_than_positions(tmp_path: Path) -> None:
    session = open_session(handmade(tmp_path / "m"))
    with pytest.raises(EvalError, match=f"{POSITIONS + 1} tokens are more than the model's {POSITIONS} positions"):
        session.logits(tokens_of(1, POSITIONS + 1, VOCABULARY))
    with pytest.raises(EvalError, match=f"{POSITIONS + 3} tokens are more"):
        session.stream(tokens_of(1, POSITIONS, VOCABULARY), 3)
    (tmp_path / "m" / "config.json").unlink()
    assert open_session(tmp_path / "m").positions == NO_POSITIONS


def test_closed(exported: Path) -> None:
    session = open_session(exported)
    stream = session.stream(tokens_of(1, 4), 4)
    next(stream)
    session.close()
    for use in (
        lambda: next(stream),
        lambda: session.logits(tokens_of(1, 4)),
        lambda: list(session.stream(tokens_of(1, 4), 2)),
    ):
        with pytest.raises(OptkitError, match="the session was closed"):
            use()


def test_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="there is no tokenizer"):
        open_session(handmade(tmp_path / "m")).encode("text")


class Tone(Setting):
    """Changes a torch model."""

    kind: ClassVar[str] = "tone"


class Any(Setting):
    """Changes nothing."""

    accepts: ClassVar[frozenset[Format]] = frozenset(Format)


def test_settings_and_dtypes_are_refused(exported: Path) -> None:
    with pytest.raises(StageError, match=r"cannot be applied to an ONNX model. It is for a torch model. Take it out"):
        open_session(exported, [Any(), Tone()])
    with pytest.raises(
        OptkitError, match=r"an ONNX model cannot be opened as float16. Its files say what it computes in"
    ):
        open_session(exported, dtype="float16")
    assert isinstance(open_session(exported, [Any()]), OnnxSession)


def test_a_checkpoint_with_onnx_beside_is_opened_by_torch(exported: Path, tiny_model: Callable[[str], Path]) -> None:
    shutil.copy(tiny_model("llama") / "model.safetensors", exported)
    assert isinstance(open_session(exported), TorchSession)


def test_evals_run_unchanged(exported: Path, tiny_model: Callable[[str], Path]) -> None:
    ours, theirs = open_session(exported), open_session(tiny_model("llama"))
    context = EvalContext(baseline=theirs)
    perplexity = Perplexity(**TEXT)
    assert values(perplexity.run(ours, context))["perplexity"] == pytest.approx(
        values(perplexity.run(theirs, context))["perplexity"], rel=1e-5
    )
    moved = values(Divergence(**TEXT).run(ours, context))
    assert moved["kl_divergence"] == pytest.approx(0, abs=1e-8)
    assert moved["top1_agreement"] == 1
    timed = values(Throughput(prompts=(8,), new_tokens=4, repeats=2, warmup=1).run(ours, context))
    assert timed["decode_tokens_per_s"] > 0
    assert timed["decode_bytes_per_s"] > 0


def test_footprint_has_the_protocol_of_a_checkpoint(exported: Path, tiny_model: Callable[[str], Path]) -> None:
    ours, theirs = (Footprint().run(open_session(each), EvalContext()) for each in (exported, tiny_model("llama")))
    assert [(each.name, each.protocol) for each in ours] == [(each.name, each.protocol) for each in theirs]
    found = values(ours)
    weights = sum((exported / name).stat().st_size for name in ("model.onnx", "model.onnx.data"))
    assert found["weights_bytes"] == weights
    assert found["size_bytes"] == sum(path.stat().st_size for path in exported.rglob("*") if path.is_file())
    # the tables of cosines and sines stand for no weight, and this model is tiny
    assert 32 < found["bits_per_weight"] < 42


def test_an_eval_that_needs_the_weights(exported: Path, tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(SourceError, match="the weights are in ONNX"):
        Sensitivity(**TEXT).run(open_session(exported), EvalContext(baseline=open_session(tiny_model("llama"))))
