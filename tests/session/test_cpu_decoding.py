"""Prompts and the decode step in C++ against the model that they stand for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from optkit.kernels.cpu.decoding import StepDecoder, step_decoder, why_not_step
from optkit.kernels.cpu.native import why_not_native
from optkit.session import open_session
from optkit.session.torch_session import TorchSession
from optkit.settings.compile import Compile
from tests.support.packed_models import save_packed

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
SIZES = {
    "vocab_size": 307,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 300,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def model(kind: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **fields)
    made = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for name, parameter in made.named_parameters():
        if name.endswith("bias") or "norm" in name:  # zeros and ones otherwise
            parameter.data += 0.3 * torch.randn(parameter.shape)
    return made


def check(opened: Any, batch: int, prompt: int, new_tokens: int, tolerance: float = 2e-5) -> None:
    """Compare the logits behind the prompt and of each step with those of the model for the whole text."""
    tokens = torch.randint(SIZES["vocab_size"], (batch, prompt))
    found = []
    with torch.inference_mode(), StepDecoder(opened).steps(batch, prompt + new_tokens) as steps:
        tokens = torch.cat([tokens, steps.prompt(tokens)[:, None]], dim=1)
        found.append(steps.logits.clone())
        for _ in range(new_tokens - 1):
            tokens = torch.cat([tokens, steps.next()[:, None]], dim=1)
            found.append(steps.logits.clone())
            assert torch.equal(tokens[:, -1], steps.logits.argmax(-1))
        expected = opened.float()(tokens[:, :-1]).logits[:, prompt - 1 :]
    ours = torch.stack(found, dim=1)
    assert bool(ours.isfinite().all())
    assert float((ours - expected).norm() / expected.norm()) < tolerance


def test_logits_of_given_tokens() -> None:
    opened = model("llama")
    tokens = torch.randint(SIZES["vocab_size"], (2, 14))
    with torch.inference_mode(), StepDecoder(opened).steps(2, 14) as steps:
        steps.prompt(tokens[:, :9])
        found = torch.stack([steps.logits_after(each) for each in tokens[:, 9:].unbind(1)], dim=1)
        torch.testing.assert_close(found, opened(tokens).logits[:, 9:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("batch", [1, 3, 11])
def test_families(kind: str, batch: int) -> None:
    opened = model(kind, **({"sliding_window": None} if kind == "mistral" else {}), tie_word_embeddings=batch == 1)
    assert why_not_step(opened) is None
    check(opened, batch, prompt=9, new_tokens=6)


@pytest.mark.parametrize(
    "fields", [{"rope_parameters": LLAMA3}, {"attention_bias": True, "mlp_bias": True}, {"rms_norm_eps": 0.1}]
)
def test_fields(fields: dict[str, Any]) -> None:
    opened = model("llama", **fields)
    assert why_not_step(opened) is None
    check(opened, 2, prompt=130, new_tokens=5)


def test_weights_in_bfloat16() -> None:
    opened = model("llama", torch.bfloat16)
    assert why_not_step(opened) is None
    check(opened, 1, prompt=4, new_tokens=4, tolerance=2e-2)  # the prompt is computed in bfloat16


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_sessions(method: str, symmetric: bool, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    save_packed(tiny_model("qwen2"), tmp_path / "packed", tmp_path / "plain", method=method, symmetric=symmetric)
    session, plain = open_session(tmp_path / "packed"), open_session(tmp_path / "plain")
    assert isinstance(session, TorchSession)
    assert session.notes[-1] == "decode: each step is one call of optkit's CPU kernels, in float32"
    for batch, prompt, new_tokens in ((1, 5, 8), (2, 3, 4), (1, 5, 1), (1, 7, 0), (1, 250, 30)):
        tokens = torch.randint(session.vocabulary, (batch, prompt))
        assert torch.equal(session.generate(tokens, new_tokens), plain.generate(tokens, new_tokens))
    first, second = torch.randint(session.vocabulary, (2, 1, 5))
    together = list(zip(session.stream(first, 6), session.stream(second, 6), strict=True))
    for index, tokens in enumerate((first, second)):
        assert torch.equal(torch.stack([pair[index] for pair in together], dim=1), plain.generate(tokens, 6)[:, 5:])
    tokens = torch.randint(session.vocabulary, (2, 12))
    torch.testing.assert_close(session.stepped_logits(tokens, 5), plain.logits(tokens)[:, 5:], rtol=1e-4, atol=1e-4)
    session.close()


def test_what_keeps_transformers_step(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    save_packed(tiny_model("llama"), tmp_path / "packed", tmp_path / "plain")
    assert not any("decode" in note for note in open_session(tmp_path / "plain").notes)
    compiled = open_session(tmp_path / "packed", [Compile(devices=("cpu",))])
    assert not any("decode" in note for note in compiled.notes)


def test_reasons() -> None:
    assert step_decoder(model("gemma"))[1] == []
    assert "gemma is not of the families" in str(why_not_step(model("gemma")))
    assert why_not_step(model("llama", hidden_act="gelu")) == "the MLP's activation is gelu, not silu"
    assert why_not_step(model("mistral", sliding_window=8)) == "its attention has a sliding window"
    assert "is_causal: false" in str(why_not_step(model("llama", is_causal=False)))
    assert step_decoder(model("mistral", sliding_window=8)) == (
        None,
        ["decode: transformers computes each step, because its attention has a sliding window"],
    )
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert (
        why_not_step(model("llama", rope_parameters=dynamic)) == "its rotary embeddings (dynamic) "
        "change with the length of the text"
    )
    assert why_not_step(model("llama").half()) == "model.layers.0.self_attn.q_proj is neither float32 nor bfloat16"
    odd = model("llama")
    odd.config.intermediate_size = 100
    assert why_not_step(odd) == "its widths are no multiples of 16"
    odd = model("llama")
    odd.model.layers[1].mlp.up_proj = nn.Identity()
    assert why_not_step(odd) == "model.layers.1.mlp.up_proj has weights in a form that it does not read"
