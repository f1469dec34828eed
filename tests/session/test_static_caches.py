from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optkit.kernels.cuda import padded_prompts
from optkit.session import open_session, static_caches
from optkit.settings.compile import Compile
from tests.conftest import TinyModel

LENGTHS = (50, 50, 61, 33, 90, 100, 50)
"""Of prompts: most are padded to 64 tokens, two to 128."""


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 90, (2, length), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_padded_prompts_say_what_the_model_says(
    tiny_model: TinyModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[Callable[[], object]] = []

    def record(launch: Callable[[], object]) -> Any:
        captured.append(launch)
        return SimpleNamespace(replay=launch)

    monkeypatch.setattr(padded_prompts, "captured", record)
    monkeypatch.setattr(padded_prompts, "waits", lambda launch: False)
    monkeypatch.setattr(static_caches, "takes_graphs", lambda model, cache: True)
    plain: Any = open_session(tiny_model(kind))
    session: Any = open_session(tiny_model(kind))
    session.compiled, session.model._compiled_call_impl = True, session.model._call_impl
    for each in prompts():
        assert session.generate(each, 12).equal(plain.generate(each, 12))
    assert len(captured) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral"])
def test_graphs_of_prompts_say_what_the_model_says(tiny_model: TinyModel, kind: str) -> None:
    plain: Any = open_session(tiny_model(kind), device="cuda")
    session: Any = open_session(tiny_model(kind), [Compile(mode="reduce-overhead")], "cuda")
    for each in prompts():
        assert session.generate(each, 12).equal(plain.generate(each, 12))
    session.close()


@pytest.mark.gpu
def test_what_python_waits_for_is_no_graph() -> None:
    number = torch.ones((), device="cuda")
    assert not padded_prompts.waits(lambda: number + 1)
    assert padded_prompts.waits(lambda: number.item())
    assert padded_prompts.waits(lambda: torch.tensor([1.0], device="cuda"))
