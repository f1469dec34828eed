from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM

from optkit.errors import EvalError, MissingPackageError, OptkitError, ResourceError, SourceError
from optkit.kernels import integer_kernels as integer
from optkit.kernels.cpu.coded_linear import CodedLinear
from optkit.kernels.embedding_bag_linear import BagLinear
from optkit.kernels.int4 import CPU_TILES, Int4Linear
from optkit.kernels.packed_linear import PackedLinear
from optkit.measure import Session
from optkit.session import cast_logits, open_session
from optkit.settings.attention import Attention
from optkit.settings.compile import Compile
from optkit.stage import Setting
from tests.conftest import TinyModel
from tests.support.near import near
from tests.support.packed_models import equally_fast, save_packed

KINDS = ["llama", "qwen2", "gemma3", "gpt2", "mixtral", "qwen2_moe"]


def prompt(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(1, 500, (batch, length), generator=torch.Generator().manual_seed(batch * length))


def reference(directory: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, **options).eval()


def copied(
    source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None] | None = None, **config: Any
) -> Path:
    shutil.copytree(source, target)
    if change:
        tensors = load_file(target / "model.safetensors")
        change(tensors)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    held = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(held))
    return target


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
    def blank(tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            tensor.zero_()

    session = open_session(copied(tiny_model("llama"), tmp_path / "blank", blank))
    assert session.generate(prompt(1, 4), 7)[0, 4:].tolist() == [0] * 7


def test_text_is_encoded_by_the_models_tokenizer(tiny_model: TinyModel) -> None:
    session = open_session(tiny_model("llama"))
    ids = session.encode("from pathlib import Path")
    assert ids.dtype == torch.int64
    assert session.tokenizer.decode(ids) == "from pathlib import Path"


def test_a_directory_without_tokenizer(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = copied(tiny_model("llama"), tmp_path / "m")
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
        open_session(copied(tiny_model("llama"), tmp_path / "a", lambda tensors: tensors.pop(name)))  # type: ignore[arg-type,return-value]
    with pytest.raises(SourceError, match=r"1 unexpected \(extra\)"):
        open_session(copied(tiny_model("llama"), tmp_path / "b", lambda tensors: tensors.update(extra=torch.ones(2))))
    with pytest.raises(SourceError, match="transformers cannot open it"):
        open_session(copied(tiny_model("llama"), tmp_path / "c", model_type="no_such"))
    with pytest.raises(
        SourceError,
        match=r"9 mismatched \(model\.layers\.0\.mlp\.down_proj\.weight, "
        r".*belong together",
    ):
        open_session(copied(tiny_model("llama"), tmp_path / "d", intermediate_size=96))


def test_masks_that_old_files_hold_are_no_weights(tiny_model: TinyModel, tmp_path: Path) -> None:
    def add_masks(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 512, 512).tril().bool()
        tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)

    old = open_session(copied(tiny_model("gptj"), tmp_path / "old", add_masks))
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
        ResourceError,
        match=r"out of memory in the logits of 2 x 12 "
        r"tokens on cpu.*Lower the window or the batch",
    ):
        session.logits(prompt())
    with pytest.raises(
        ResourceError,
        match=r"at new token 1 of 2 x 12 tokens on cpu.*Lower "
        r"the batch, the prompt or the new tokens",
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
    all_of_them = copied(source, tmp_path / "all", num_experts_per_tok=4)
    experts = 2 * 4 * 3 * 64 * 128 * 4
    assert open_session(all_of_them).decode_bytes(1, 8) - open_session(source).decode_bytes(1, 8) == experts // 2


def test_a_sliding_window_bounds_the_cache(tiny_model: TinyModel) -> None:
    session = open_session(tiny_model("gemma3"))
    per_token = 2 * 2 * 16 * 4
    assert session.decode_bytes(1, 300) - session.decode_bytes(1, 200) == 100 * per_token
    assert session.decode_bytes(1, 7) - session.decode_bytes(1, 6) == 3 * per_token


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_give_the_logits_of_the_float_model(
    kind: str, method: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    equally_fast(monkeypatch)
    save_packed(tiny_model(kind), tmp_path / "packed", tmp_path / "plain", method=method)
    session, tokens = open_session(tmp_path / "packed"), prompt()
    with torch.no_grad():
        assert near(session.logits(tokens), reference(tmp_path / "plain")(tokens).logits, 1e-4)
    assert torch.equal(session.generate(tokens, 5), open_session(tmp_path / "plain").generate(tokens, 5))
    packed = [
        module for module in session.model.modules() if isinstance(module, (BagLinear, CodedLinear, PackedLinear))
    ]
    assert session.notes[0].split(" use ")[0] == f"int4: {len(packed)} of {len(packed)} layers"
    assert session.decode_bytes(1, 8) < 0.7 * open_session(tmp_path / "plain").decode_bytes(1, 8)


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("symmetric", "activation_order"), [(True, False), (False, False), (False, True)])
def test_all_grids(
    method: str, bits: int, symmetric: bool, activation_order: bool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    options = {"bits": bits, "symmetric": symmetric, "activation_order": activation_order, "group_size": 64}
    save_packed(tiny_model("llama"), tmp_path / "packed", tmp_path / "plain", method=method, **options)  # type: ignore[arg-type]
    session, tokens = open_session(tmp_path / "packed"), prompt()
    with torch.no_grad():
        assert near(session.logits(tokens), reference(tmp_path / "plain")(tokens).logits, 1e-4)
    assert session.notes[0].startswith(f"int{bits}: 21 of 21 layers")


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in CPU_TILES, reason="torch's int4 kernel needs AVX2")
@pytest.mark.parametrize("symmetric", [True, False])
def test_bfloat16_uses_torchs_kernel(
    symmetric: bool, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    equally_fast(monkeypatch)
    monkeypatch.setattr(integer, "why_not_coded", lambda weight, device: "there is no compiler")
    save_packed(tiny_model("llama"), tmp_path / "packed", tmp_path / "plain", symmetric=symmetric, dtype=torch.bfloat16)
    session, tokens = open_session(tmp_path / "packed"), prompt(2, 80)
    kinds = {
        type(session.model.get_submodule(f"model.layers.0.{name}")) for name in ("self_attn.q_proj", "mlp.up_proj")
    }
    assert kinds == {Int4Linear}
    assert session.notes[0].startswith(
        "int4: 15 of 21 layers use torch's CPU int4 kernel"
    )  # k_proj and v_proj have 32 outputs
    with torch.no_grad():
        exact = reference(tmp_path / "plain", dtype=torch.float32)(tokens).logits
        rounded = reference(tmp_path / "plain", dtype=torch.bfloat16)(tokens).logits.float()
    ours, theirs = (float((logits - exact).norm() / exact.norm()) for logits in (session.logits(tokens), rounded))
    assert ours < 1.5 * theirs < 0.1


def test_tied_weights_are_held_once(tiny_model: TinyModel, tmp_path: Path) -> None:
    save_packed(tiny_model("llama"), tmp_path / "packed", tmp_path / "plain")
    model = open_session(tmp_path / "packed").model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not any(parameter.is_meta for parameter in (*model.parameters(), *model.buffers()))


def test_an_unused_bias_of_autogptq_is_added(tiny_model: TinyModel, tmp_path: Path) -> None:
    save_packed(tiny_model("llama"), tmp_path / "packed", tmp_path / "plain", method="gptq")
    name = "model.layers.0.mlp.up_proj.bias"
    with_bias = copied(tmp_path / "packed", tmp_path / "bias", lambda tensors: tensors.update({name: torch.zeros(128)}))
    assert torch.equal(open_session(with_bias).logits(prompt()), open_session(tmp_path / "packed").logits(prompt()))


def test_packed_weights_that_do_not_fit_the_model(tiny_model: TinyModel, tmp_path: Path) -> None:
    save_packed(tiny_model("llama"), tmp_path / "packed", tmp_path / "plain")
    layer = "model.layers.0.mlp.up_proj"

    def broken(name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
        return copied(tmp_path / "packed", tmp_path / name, change)

    with pytest.raises(SourceError, match=r"up_proj: there is no weight_scale"):
        open_session(broken("a", lambda tensors: tensors.pop(f"{layer}.weight_scale")))  # type: ignore[arg-type,return-value]
    with pytest.raises(SourceError, match=r"model\.norm\.weight"):
        open_session(broken("b", lambda tensors: tensors.pop("model.norm.weight")))  # type: ignore[arg-type,return-value]
    with pytest.raises(SourceError, match=r"are no weight \[128, 64\] of 2, 3, 4 or 8 bits"):
        open_session(
            broken(
                "c", lambda tensors: tensors.update({f"{layer}.weight_packed": torch.zeros(128, 5, dtype=torch.int32)})
            )
        )
    with pytest.raises(
        SourceError,
        match=r"model.other is quantized, and LlamaForCausalLM "
        r"has no linear layer of that name",
    ):
        open_session(
            broken(
                "d", lambda tensors: tensors.update({"model.other.weight_packed": torch.zeros(1, 1, dtype=torch.int32)})
            )
        )
    with pytest.raises(SourceError, match="no layer is quantized. The quantization_config says compressed-tensors"):
        open_session(
            copied(tmp_path / "plain", tmp_path / "e", **json.loads((tmp_path / "packed" / "config.json").read_text()))
        )


def test_what_optkit_does_not_read_itself_is_left_to_transformers(tiny_model: TinyModel, tmp_path: Path) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}
    with pytest.raises((MissingPackageError, SourceError), match="gptqmodel|cannot open it"):
        open_session(copied(tiny_model("llama"), tmp_path / "awq", quantization_config=awq))


def test_settings_are_applied(tiny_model: TinyModel) -> None:
    tokens = prompt()
    plain = open_session(tiny_model("llama")).logits(tokens)
    for implementation in ("eager", "sdpa"):
        session = open_session(tiny_model("llama"), [Attention(implementation=implementation)])
        assert session.model.config._attn_implementation == implementation
        assert near(session.logits(tokens), plain, 1e-4)


class Traced(Setting):
    """As `compile`, without generating code."""

    def on_load(self, model: Any, device: str) -> Any:
        model.compile(backend="eager", dynamic=False)
        return model


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
