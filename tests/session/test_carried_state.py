import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from optkit.errors import SourceError, StageError
from optkit.model.carried_state import CarriedState, needs_positions, state_name
from optkit.model.shape import ModelShape, TensorInfo
from optkit.session import open_session
from optkit.session.step_bytes import cache_bytes
from optkit.settings.kv_cache import KvCache
from optkit.settings.speculative import Speculative
from optkit.stages.kv_scales import KvScales
from optkit.stages.onnx import Onnx
from optkit.training.generated import continued
from tests.conftest import TinyModel
from tests.support.opened import Traced
from tests.zoo.configs import tiny_config

TOKENS = torch.randint(1, 500, (2, 24), generator=torch.Generator().manual_seed(5))
PROMPT = 13
STATES = {
    "llama": "past_key_values",
    "opt": "past_key_values",
    "bamba": "past_key_values",
    "mamba": "cache_params",
    "mamba2": "cache_params",
    "falcon_mamba": "cache_params",
    "rwkv": "state",
}
HYBRIDS = ("jamba", "granitemoehybrid", "falcon_h1", "qwen3_next", "qwen3_5", "lfm2", "minimax")


def likeliest_by_whole_texts(session: Any, tokens: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Return the greedy tokens, each from the logits of the whole text before it."""
    known = tokens[:, :PROMPT]
    for _ in range(new_tokens):
        known = torch.cat([known, session.logits(known)[:, -1:].argmax(-1)], dim=1)
    return known


@pytest.mark.parametrize("kind", STATES)
def test_decode_steps_compute_what_the_whole_text_does(kind: str, tiny_model: TinyModel) -> None:
    session = open_session(tiny_model(kind))
    assert state_name(session.model) == STATES[kind]
    for tokens in (TOKENS[:1],) if kind == "rwkv" else (TOKENS[:1], TOKENS):
        whole = session.logits(tokens)
        torch.testing.assert_close(
            session.stepped_logits(tokens, PROMPT), whole[:, PROMPT:], rtol=0, atol=2e-6 * float(whole.abs().max())
        )
        alone = torch.cat(
            [session.step(each, session.new_state()) for each in tokens[:1, PROMPT:].split(1, dim=1)], dim=1
        )
        assert float((alone - whole[:1, PROMPT:]).abs().max()) > 0.1 * float(whole.abs().max())
        assert session.generate(tokens[:, :PROMPT], 9).equal(likeliest_by_whole_texts(session, tokens, 9))


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_hybrid_generates_what_transformers_does(kind: str, tiny_model: TinyModel) -> None:
    session = open_session(tiny_model(kind))
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind)).eval()
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    prompts = TOKENS[:, :PROMPT]
    expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    assert session.generate(prompts, 9).equal(expected)
    assert torch.stack(list(session.stream(prompts, 9)), dim=1).equal(expected[:, PROMPT:])
    assert not session.shares_contexts
    whole = session.logits(TOKENS)
    torch.testing.assert_close(
        session.stepped_logits(TOKENS, PROMPT), whole[:, PROMPT:], rtol=0, atol=4e-6 * float(whole.abs().max())
    )


def test_missing_kernels_of_states_are_told_once(
    tiny_model: TinyModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # to be seen here
    told = {}
    for kind in ("llama", "mamba2", "qwen3_5", "lfm2"):
        session = open_session(tiny_model(kind))
        session.generate(TOKENS[:1, :4], 2)
        told[kind] = [note for note in session.notes if note.startswith("states:")]
    torch_is = "states: plain torch, which is right and slow; the kernels for GPUs are those of causal-conv1d"
    assert told == {
        "llama": [],
        "mamba2": [f"{torch_is} and mamba-ssm"],
        "qwen3_5": [f"{torch_is} and flash-linear-attention"],
        "lfm2": [torch_is],
    }
    assert "falling back" not in caplog.text


def test_a_coded_cache_of_a_hybrid_codes_keys_and_values_alone(tiny_model: TinyModel) -> None:
    plain, coded = open_session(tiny_model("qwen3_5")), open_session(tiny_model("qwen3_5"), [KvCache(dtype="int8")])
    whole = coded.logits(TOKENS)
    assert 0 < float((whole - plain.logits(TOKENS)).norm() / whole.norm()) < 0.01
    torch.testing.assert_close(
        coded.stepped_logits(TOKENS, PROMPT), whole[:, PROMPT:], rtol=0, atol=4e-6 * float(whole.abs().max())
    )
    assert coded.decode_bytes(1, 400) < plain.decode_bytes(1, 400)
    with pytest.raises(StageError, match="the model's layers are not all of attention. Take window out"):
        open_session(tiny_model("qwen3_5"), [KvCache(window=8)])


@pytest.mark.parametrize("setting", [KvCache(dtype="int8"), Speculative(prompt_lookup=2)])
def test_a_cache_of_the_model_s_own_is_left_alone(setting: Any, tiny_model: TinyModel) -> None:
    with pytest.raises(StageError, match="MiniMaxForCausalLM has no KV cache. What it keeps .* its `MiniMaxCache`"):
        open_session(tiny_model("minimax"), [setting])


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("llama", ()),
        ("gemma3_text", ()),
        ("qwen3_5_text", ("onnx", "kv_scales")),
        ("mamba2", ("onnx", "kv_scales", "kv_cache")),
        ("minimax", ("onnx", "kv_scales", "kv_cache")),
        ("deepseek_v32", ("onnx", "kv_scales", "kv_cache")),
        ("openai-gpt", ("onnx", "kv_scales", "kv_cache")),
    ],
)
def test_what_a_model_keeps_is_known_in_the_plan(kind: str, refused: tuple[str, ...]) -> None:
    config = tiny_config(kind, architectures=["XForCausalLM"])
    blocks = range(config.num_hidden_layers)
    names = [f"model.layers.{index}.self_attn.{name}_proj.weight" for index in blocks for name in "kv"]
    shape = ModelShape(config.to_dict(), {name: TensorInfo("F32", (32, 64)) for name in names})
    checks = {
        "onnx": lambda: Onnx(exporter="torch").predict(shape, "cpu"),
        "kv_scales": lambda: KvScales(calibration={"dataset": "python-reference"}).predict(shape, "cpu"),
        "kv_cache": lambda: KvCache(dtype="int8").check(shape, "cpu"),
    }
    for stage, check in checks.items():
        with (
            pytest.raises(StageError, match=f"^{stage}.*keeps something else of its tokens")
            if stage in refused
            else nullcontext()
        ):
            check()
    if "onnx" in refused:
        Onnx(exporter="torch", kv_cache=False).predict(shape, "cpu")


def test_a_step_that_mixes_the_sequences_of_a_batch_is_refused(tiny_model: TinyModel) -> None:
    session = open_session(tiny_model("rwkv"))  # transformers 5.17 adds [batch, hidden] to [batch, 1, hidden]
    with pytest.raises(
        SourceError,
        match=r"gives logits of \[2, 2\] for tokens of \[2, 1\].*mixes the sequences of a batch. Use a batch",
    ):
        session.generate(TOKENS, 2)


def test_only_a_model_that_counts_from_zero_is_told_its_positions(tiny_model: TinyModel) -> None:
    told = {
        kind: needs_positions(open_session(tiny_model(kind)).model, torch.device("cpu"))
        for kind in ("llama", "opt", "gpt2", "bamba", "rwkv")
    }
    assert told == {"llama": False, "opt": False, "gpt2": False, "bamba": True, "rwkv": False}


@pytest.mark.parametrize("kind", ["mamba", "rwkv", "bamba"])
def test_a_compiled_step_carries_the_state(kind: str, tiny_model: TinyModel) -> None:
    torch._dynamo.reset()
    session = open_session(tiny_model(kind), [Traced()])
    assert session.compiled
    tokens = TOKENS[:1]
    assert session.generate(tokens[:, :PROMPT], 5).equal(likeliest_by_whole_texts(session, tokens, 5))
    session.close()


@pytest.mark.parametrize("kind", ["mamba", "rwkv"])
def test_a_state_is_as_large_for_any_context(kind: str, tiny_model: TinyModel) -> None:
    session = open_session(tiny_model(kind))
    state = session.new_state()
    session.step(TOKENS[:1, :1], state)
    held = (
        state.held
        if kind == "rwkv"
        else [each[0] for layer in state.layers for each in (layer.conv_states, layer.recurrent_states)]
    )
    size = sum(tensor.numel() * 4 for tensor in held)
    assert cache_bytes(state.held, 3, 500) == 3 * size > 0
    assert session.decode_bytes(1, 1) == session.decode_bytes(1, 500)


@pytest.mark.parametrize("kind", ["mamba", "bamba"])
def test_a_teacher_without_keys_and_values_writes_what_it_predicts(kind: str, tiny_model: TinyModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind)).eval()
    written = continued(model, TOKENS[:, :PROMPT], PROMPT + 6, 1e-4, torch.Generator().manual_seed(0))
    assert written.equal(likeliest_by_whole_texts(open_session(tiny_model(kind)), TOKENS, 6))


@pytest.mark.parametrize("kind", ["mamba", "rwkv"])
@pytest.mark.parametrize("setting", [KvCache(dtype="int8"), Speculative(prompt_lookup=2)])
def test_what_needs_keys_and_values_is_refused(kind: str, setting: Any, tiny_model: TinyModel) -> None:
    with pytest.raises(
        StageError, match=r"(has no KV cache|layers of another kind).*Take .* out for this architecture"
    ):
        open_session(tiny_model(kind), [setting])


class Forgetful:
    """Takes a state and returns none."""

    config = SimpleNamespace(model_type="odd")

    def forward(self, input_ids: torch.Tensor, state: Any = None, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 8))


class Foreign(Forgetful):
    def forward(self, input_ids: torch.Tensor, mems: Any = None) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 8))


def test_a_state_of_no_known_kind_is_refused() -> None:
    with pytest.raises(
        SourceError,
        match=r"odd: Foreign cannot be run token by token: its passes take none of past_key_values, cache_params",
    ):
        CarriedState(Foreign())
    with pytest.raises(
        SourceError, match="odd: Forgetful takes `state` and returns none. Each token would see only the one before it"
    ):
        CarriedState(Forgetful()).step(TOKENS)
