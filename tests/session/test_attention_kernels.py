from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from optkit_evals.throughput import Throughput
from torch.nn.functional import scaled_dot_product_attention

from optkit.measure import EvalContext
from optkit.session import open_session
from optkit.session.attention_kernels import kernels_text, watched_attention
from optkit.settings.attention import Attention

TOKENS = torch.arange(16)[None]


@pytest.mark.parametrize("quiet", [torch.inference_mode, torch.no_grad])
def test_what_torch_dispatches_to_is_seen(quiet: Callable[[], torch.inference_mode]) -> None:
    states = torch.randn(1, 4, 8, 16)
    with quiet(), watched_attention() as kernels:
        seen = scaled_dot_product_attention(states, states, states)
        scaled_dot_product_attention(states, states, states, dropout_p=0.5)  # has no fused kernel on a CPU
    assert kernels == {"flash": 1, "math": 1}
    assert seen.equal(scaled_dot_product_attention(states, states, states))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), quiet(), watched_attention() as kernels:
        scaled_dot_product_attention(states, states, states)
    assert kernels == {"math": 1}


def test_in_words() -> None:
    assert kernels_text(Counter()) == ""
    assert kernels_text(Counter(flash=3)) == "flash"
    assert kernels_text(Counter(math=1, flash=3)) == "flash (3), math (1)"


def test_a_session_says_what_computes_its_attention(tiny_model: Callable[[str], Path]) -> None:
    session = open_session(tiny_model("llama"), [Attention(implementation="sdpa")])
    before = session.generate(TOKENS, 4)
    assert session.attention_kernels(TOKENS) == "flash"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert session.attention_kernels(TOKENS) == "math"
    assert session.generate(TOKENS, 4).equal(before)
    eager = open_session(tiny_model("llama"), [Attention(implementation="eager")])
    assert eager.attention_kernels(TOKENS) == "eager"


def test_throughput_notes_it(tiny_model: Callable[[str], Path]) -> None:
    context = EvalContext()
    Throughput(prompts=(8,), new_tokens=2, repeats=2, limit_s=1e-9).run(open_session(tiny_model("llama")), context)
    assert context.notes[-1].endswith("; attention by flash")


@pytest.mark.gpu
def test_on_a_gpu(tiny_model: Callable[[str], Path]) -> None:
    session = open_session(tiny_model("llama"), [Attention(implementation="sdpa")], device="cuda", dtype="bfloat16")
    assert session.attention_kernels(TOKENS).split()[0].strip(",") in {"flash", "efficient", "cuDNN", "math"}


def test_a_decoder_of_its_own_is_said(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(tiny_model("llama"))
    monkeypatch.setattr(session, "_decoder", object())
    assert session.attention_kernels(TOKENS) == "flash in prompts, kernels of its own in steps"
