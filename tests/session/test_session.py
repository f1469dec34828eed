import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM

from optkit.errors import EvalError, OptkitError, ResourceError, SourceError
from optkit.measure import Session
from optkit.session import cast_logits, open_session
from optkit.session.generating import when_done
from optkit.settings.attention import Attention
from optkit.settings.compile import Compile
from optkit.stage import Setting
from tests.conftest import TinyModel
from tests.support.changes import changed_copy, without
from tests.support.near import near
from tests.support.opened import KINDS, Traced, prompt, reference
from tests.support.packed_models import save_packed


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_tokens_are_those_of_transformers(kind: str, tiny_model: TinyModel) -> None:
    session: Session = open_session(tiny_model(kind))
    model, tokens = reference(tiny_model(kind)), prompt()
    with torch.no_grad():
        assert near(session.logits(tokens), model(tokens).logits)
    model.generation_config.eos_token_id = None
    expected = model.generate(tokens, max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert torch.equal(session.generate(tokens, 9), expected)
    assert torch.equal(torch.stack(list(session.stream(tokens, 9)), dim=1), expected[:, 12:])
    assert (session.vocabulary, session.positions, session.device, session.notes) == (512, 512, "cpu", ())


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gemma3", "opt"])
def test_logits_in_slices_are_the_same(kind: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast_logits, "LOGITS_BYTES", 5 * 2 * 512 * 2)
    tokens = prompt(2, 12)
    with torch.no_grad():
        expected = reference(tiny_model(kind), dtype=torch.bfloat16)(tokens).logits.float()
    ours = open_session(tiny_model(kind), dtype="bfloat16").logits(tokens)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.02)


def test_generation_never_stops_at_the_end_of_text(tiny_model: TinyModel, tmp_path: Path) -> None:
    def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    session = open_session(changed_copy(tiny_model("llama"), tmp_path, blank))
    assert session.generate(prompt(1, 4), 7)[0, 4:].tolist() == [0] * 7


def test_text_is_encoded_by_the_models_tokenizer(tiny_model: TinyModel) -> None:
    session = open_session(tiny_model("llama"))
    ids = session.encode("from pathlib import Path")
    assert ids.dtype == torch.int64
    assert session.tokenizer.decode(ids) == "from pathlib import Path"


def test_a_directory_without_tokenizer(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = changed_copy(tiny_model("llama"), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    with pytest.raises(SourceError, match="there is no tokenizer"):
        open_session(directory).encode("a")


def test_more_tokens_than_positions(tiny_model: TinyModel) -> None:
    session = open_session(tiny_model("llama"))
    with pytest.raises(EvalError, match="513 tokens are more than the model's 512 positions"):
        session.logits(torch.ones(1, 513, dtype=torch.int64))
    with pytest.raises(EvalError, match="514 tokens"):
        session.stream(torch.ones(1, 500, dtype=torch.int64), 14)


def test_missing_and_unknown_weights_are_errors(tiny_model: TinyModel, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(SourceError, match=rf"1 missing \({name}\)"):
        open_session(changed_copy(tiny_model("llama"), tmp_path / "a", without(name)))
    with pytest.raises(SourceError, match=r"1 unexpected \(extra\)"):
        open_session(changed_copy(tiny_model("llama"), tmp_path / "b", lambda held: held | {"extra": torch.ones(2)}))
    with pytest.raises(SourceError, match="transformers cannot open it"):
        open_session(changed_copy(tiny_model("llama"), tmp_path / "c", model_type="no_such"))
    with pytest.raises(
        SourceError, match=r"9 mismatched \(model\.layers\.0\.mlp\.down_proj\.weight, .*belong together"
    ):
        open_session(changed_copy(tiny_model("llama"), tmp_path / "d", intermediate_size=96))


def test_masks_that_old_files_hold_are_no_weights(tiny_model: TinyModel, tmp_path: Path) -> None:
    masks = {"bias": torch.ones(1, 1, 512, 512).tril().bool(), "masked_bias": torch.tensor(-1e4)}
    added = {f"transformer.h.0.attn.{name}": mask for name, mask in masks.items()}
    old = open_session(changed_copy(tiny_model("gptj"), tmp_path, lambda held: held | added))
    assert torch.equal(old.logits(prompt()), open_session(tiny_model("gptj")).logits(prompt()))


def test_errors_of_loading_are_the_models(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("issues during automatic conversion of the weights")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(SourceError, match=r"transformers cannot open it\. issues during automatic conversion"):
        open_session(tiny_model("llama"))


def test_nothing_is_written_on_the_terminal(tiny_model: TinyModel, capfd: pytest.CaptureFixture[str]) -> None:
    session = open_session(tiny_model("llama"))
    session.generate(prompt(), 2)
    session.encode("a " * 2000)
    assert capfd.readouterr() == ("", "")


def test_a_closed_session(tiny_model: TinyModel) -> None:
    session = open_session(tiny_model("llama"))
    session.close()
    with pytest.raises(OptkitError, match="the session was closed"):
        session.logits(prompt())


def test_unknown_dtype(tiny_model: TinyModel) -> None:
    with pytest.raises(OptkitError, match="'int8' is no float dtype of torch"):
        open_session(tiny_model("llama"), dtype="int8")


def test_out_of_memory_says_what_to_lower(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(tiny_model("llama"))

    def full(**_: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(session.model, "forward", full)
    with pytest.raises(
        ResourceError, match=r"out of memory in the logits of 2 x 12 tokens on cpu.*Lower the window or the batch"
    ):
        session.logits(prompt())
    with pytest.raises(
        ResourceError, match=r"at new token 1 of 2 x 12 tokens on cpu.*Lower the batch, the prompt or the new tokens"
    ):
        session.generate(prompt(), 3)

    def no_room(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", no_room)
    with pytest.raises(ResourceError, match=r"out of memory while the model was opened on cpu.*smaller dtype"):
        open_session(tiny_model("llama"))


def test_other_runtime_errors_pass(tiny_model: TinyModel) -> None:
    session = open_session(tiny_model("llama"))
    with pytest.raises((RuntimeError, IndexError)):
        session.logits(torch.full((1, 3), 600))


def test_bytes_of_a_decode_step(tiny_model: TinyModel) -> None:
    cache = 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, bytes
    matrices = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128
    llama = open_session(tiny_model("llama"))
    frequencies = sum(buffer.numel() * 4 for buffer in llama.model.buffers())
    floats = 3 * (matrices + 2 * 64) + 64 + 512 * 64
    assert llama.decode_bytes(2, 100) == floats * 4 + frequencies + 2 * 100 * cache
    untied = open_session(tiny_model("qwen2"))
    floats = 2 * (matrices + 2 * 64 + 64 + 2 * 32) + 64 + 512 * 64 + 3 * 64  # lm_head, and three rows of the embedding
    assert untied.decode_bytes(3, 10) == floats * 4 + frequencies + 3 * 10 * cache * 2 // 3


def test_experts_that_a_token_is_not_sent_to_are_not_read(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("mixtral")
    all_of_them = changed_copy(source, tmp_path, num_experts_per_tok=4)
    experts = 2 * 4 * 3 * 64 * 128 * 4
    assert open_session(all_of_them).decode_bytes(1, 8) - open_session(source).decode_bytes(1, 8) == experts // 2


def test_a_sliding_window_bounds_the_cache(tiny_model: TinyModel) -> None:
    session = open_session(tiny_model("gemma3"))
    per_token = 2 * 2 * 16 * 4
    assert session.decode_bytes(1, 300) - session.decode_bytes(1, 200) == 100 * per_token
    assert session.decode_bytes(1, 7) - session.decode_bytes(1, 6) == 3 * per_token


def test_settings_are_applied(tiny_model: TinyModel) -> None:
    tokens = prompt()
    plain = open_session(tiny_model("llama")).logits(tokens)
    for implementation in ("eager", "sdpa"):
        session = open_session(tiny_model("llama"), [Attention(implementation=implementation)])
        assert session.model.config._attn_implementation == implementation
        assert near(session.logits(tokens), plain, 1e-4)


WITH_CODE = pytest.param(
    Compile(devices=("cpu",)),
    marks=[pytest.mark.slow, pytest.mark.skipif(not shutil.which("g++"), reason="there is no C++ compiler")],
)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("setting", [Traced(), WITH_CODE])
@pytest.mark.filterwarnings("error::UserWarning:torch._dynamo")
def test_a_compiled_step_gives_the_same_tokens(
    setting: Setting, packed: bool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    directory = tiny_model("llama")
    if packed:
        save_packed(directory, tmp_path / "packed", tmp_path / "plain")
        directory = tmp_path / "packed"
    expected, session = open_session(directory), open_session(directory, [setting])
    for batch, length in ((1, 6), (2, 9), (1, 6)):
        tokens = prompt(batch, length)
        assert torch.equal(session.generate(tokens, 4), expected.generate(tokens, 4))
    assert torch.equal(session.logits(tokens), expected.logits(tokens))
    session.close()


class Counted(Setting):
    """As `Traced`; counts how often the step is compiled."""

    def on_load(self, model: Any, device: str) -> Any:
        counter.clear()
        model.compile(backend=counter, dynamic=False)
        return model


counter = CompileCounter()


@pytest.mark.parametrize("kind", ["gpt2", "gemma3", "gpt_oss", "mixtral"])
def test_a_step_is_compiled_once(kind: str, tiny_model: TinyModel) -> None:
    tokens, expected, session = (
        prompt(2, 6),
        open_session(tiny_model(kind)),
        open_session(tiny_model(kind), [Counted()]),
    )
    assert torch.equal(session.generate(tokens, 12), expected.generate(tokens, 12))  # over the window of 8 tokens
    assert counter.frame_count == 1
    session.close()


@pytest.mark.gpu
def test_experts_that_python_waits_for_stand_between_graphs(tiny_model: TinyModel) -> None:
    tokens = prompt(2, 6)
    expected = open_session(tiny_model("mixtral"), device="cuda")
    session = open_session(tiny_model("mixtral"), [Compile(mode="reduce-overhead")], "cuda")
    for _ in range(2):  # the first steps record the graphs that those behind them replay
        assert torch.equal(session.generate(tokens, 12), expected.generate(tokens, 12))
    session.close()


@pytest.mark.parametrize("settings", [(), (Traced(),)])
def test_streams_do_not_disturb_each_other(settings: tuple[Setting, ...], tiny_model: TinyModel) -> None:
    session = open_session(tiny_model("qwen2"), settings)
    first, second = prompt(2, 6), prompt(2, 6) + 1
    expected = [session.generate(tokens, 5)[:, 6:] for tokens in (first, second)]
    pairs = list(zip(session.stream(first, 5), session.stream(second, 5), strict=True))
    for tokens, want in zip(zip(*pairs, strict=True), expected, strict=True):
        assert torch.equal(torch.stack(tokens, dim=1), want)
    left = session.stream(first, 5)
    next(left)
    left.close()
    assert torch.equal(session.generate(second, 5)[:, 6:], expected[1])
    session.close()


def test_what_is_behind_a_token_is_queued_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Event:
        def record(self, stream: None) -> None:
            self.name = f"{max(filter(str.isdigit, seen))} done"

        def synchronize(self) -> None:
            seen.append(self.name)

    def queued() -> Iterator[torch.Tensor]:
        for number in range(3):
            seen.append(str(number))
            yield torch.tensor([number])

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    assert [(int(tokens), seen[-1]) for tokens in when_done(queued())] == [(0, "0 done"), (1, "1 done"), (2, "2 done")]
    assert seen == ["0", "1", "0 done", "2", "1 done", "2 done"]


def test_a_stream_ends_when_the_session_is_closed(tiny_model: TinyModel) -> None:
    session = open_session(tiny_model("llama"), [Traced()])
    stream = session.stream(prompt(), 5)
    next(stream)
    session.close()
    with pytest.raises(OptkitError, match="the session was closed"):
        next(stream)
    assert session._static.idle is None


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 0.80), ("bfloat16", 0.60)])
def test_resident_memory_is_well_under_bfloat16(dtype: str, limit: float, smol: Path, tmp_path: Path) -> None:
    save_packed(smol, tmp_path / "packed", tmp_path / "plain", group_size=64, dtype=getattr(torch, dtype))
    program = """
import sys, psutil
from pathlib import Path
from optkit.session import open_session
import accelerate, transformers.models.llama.modeling_llama
before = psutil.Process().memory_info().rss
session = open_session(Path(sys.argv[1]))
print(psutil.Process().memory_info().rss - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "packed")], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < limit * 134_515_008 * 2


@pytest.mark.slow
def test_the_real_model_generates_as_transformers_does(smol: Path) -> None:
    session, model = open_session(smol), reference(smol)
    tokens = session.encode("The capital of France is").unsqueeze(0)
    model.generation_config.eos_token_id = None
    assert torch.equal(
        session.generate(tokens, 16), model.generate(tokens, max_new_tokens=16, do_sample=False, pad_token_id=0)
    )
