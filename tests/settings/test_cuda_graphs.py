"""The setting `cuda_graphs`: which models and batches it takes, and what it excludes."""

import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from optkit.common.garbage import uncollected
from optkit.errors import MissingPackageError, RecipeError, StageError
from optkit.kernels.cuda.decoding import GraphDecoder
from optkit.kernels.cuda.model_steps import ModelSteps
from optkit.kernels.cuda.step_layers import norm_of
from optkit.plan import make_plan
from optkit.progress import asking
from optkit.recipe.recipe import load_recipe
from optkit.session import open_session
from optkit.settings.compile import Compile
from optkit.settings.cuda_graphs import CudaGraphs
from optkit.settings.kv_cache import KvCache
from optkit.settings.precision import Precision
from optkit.settings.speculative import Speculative
from optkit.stage import Setting, exclusion
from optkit.store.store import Store
from tests.kernels.test_cuda_families import random_model
from tests.support.eager_kernels import run_on_cpu


@pytest.mark.parametrize("compiles", [True, False])
def test_a_model_that_the_graph_does_not_know_is_compiled(
    compiles: bool, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaGraphs, "applies", lambda self, device: True)
    monkeypatch.setattr(Compile, "applies", lambda self, device: True)

    def require(kind: str) -> None:
        if not compiles:
            raise MissingPackageError("triton", where="compile on cuda")

    monkeypatch.setattr("optkit.settings.compile._require_tools", require)
    why = "GPT2LMHeadModel has no `embed_tokens` where Llama has one"
    session: Any = open_session(tiny_model("gpt2"), [CudaGraphs()])
    assert session.compiled == compiles
    missing = "compile on cuda: the package `triton` is not installed. Run: pip install 'triton'."
    off = f"cuda_graphs: off, because {why}. Nor is it compiled: {missing}"
    assert asking(session.notes) == ([] if compiles else [off])
    assert (f"cuda_graphs: compile: reduce-overhead in its place, because {why}" in session.notes) == compiles
    session.close()


def test_a_closed_session_keeps_no_weights(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_cpu(monkeypatch)
    monkeypatch.setattr(CudaGraphs, "applies", lambda self, device: True)
    session: Any = open_session(tiny_model("llama"), [CudaGraphs()])
    session.generate(torch.arange(6)[None], 3)
    assert not session.notes
    with uncollected():
        weight = weakref.ref(session.model.model.layers[0].mlp.down_proj.weight)
        session.close()
        assert weight() is None


def test_logits_are_compared_behind_the_models_own_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_cpu(monkeypatch)
    GraphDecoder(random_model("gemma2", {"final_logit_softcapping": 2.0}))


def test_a_norm_without_weights_has_those_of_the_model() -> None:
    like = torch.empty(16, dtype=torch.bfloat16)
    found = norm_of(torch.nn.RMSNorm(16, eps=1e-6, elementwise_affine=False), like, 1e-6)
    assert found is not None
    assert found.dtype == like.dtype
    assert found.equal(torch.ones_like(like))
    assert norm_of(torch.nn.LayerNorm(16, elementwise_affine=False), like, 1e-6) is None


OTHERS: list[Setting] = [
    Compile(),
    Speculative(prompt_lookup=3),
    KvCache(dtype="int8"),
    Precision(mode="autocast"),
    Precision(mode="tf32"),
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_one_thing_decides_how_a_token_is_decoded_whatever_the_order(
    other: Setting, tiny_model: Callable[[str], Path]
) -> None:
    for order in ([CudaGraphs(), other], [other, CudaGraphs()]):
        with pytest.raises(StageError, match="exclude each other") as error:
            open_session(tiny_model("llama"), order)
        assert "cuda_graphs" in str(error.value)
        assert str(error.value).endswith("Take one of the two out.")


def test_settings_that_exclude_each_other_are_refused_at_their_line(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    stages: list[Any] = [{"speculative": {"prompt_lookup": 3}}, "cuda_graphs"]
    for order in (stages, stages[::-1]):
        with pytest.raises(
            RecipeError, match=r"and (speculative|cuda_graphs) \(.*\) exclude each other\. Each of them decides how"
        ) as error:
            load_recipe({"model": str(tiny_model("llama")), "stages": order})
        assert "Take one of the two out." in str(error.value)
    recipe = load_recipe(
        {"model": str(tiny_model("llama")), "stages": [{"compile": {"mode": "default"}}, stages[0]]}
    ).pinned(None)
    make_plan(recipe, Store(tmp_path), "cpu")
    with pytest.raises(StageError, match="speculative and compile exclude each other"):
        make_plan(recipe, Store(tmp_path), "cuda")


def test_a_cache_of_codes_in_the_checkpoint_is_refused() -> None:
    session: Any = SimpleNamespace(codes_cache=True, device="cuda")
    with pytest.raises(
        StageError, match="the checkpoint has scales for a KV cache of codes, and cuda_graphs keeps floats"
    ):
        CudaGraphs().on_open(session)


def test_the_graph_stays_with_what_is_only_another_dtype() -> None:
    for other in (Precision(mode="bf16"), Compile(devices=("cpu",))):
        assert exclusion([CudaGraphs(), other], "cuda") is None


def test_batches_that_the_graph_does_not_take_are_noted() -> None:
    decoder = GraphDecoder.__new__(GraphDecoder)
    decoder.model, decoder._by_model, decoder._idle = SimpleNamespace(config=LlamaConfig()), {}, None
    decoder.not_in_prompts = set()
    assert decoder.notes == ()
    for batch in (512, 257, 512):
        with decoder.steps(batch, 10) as steps:
            assert isinstance(steps, ModelSteps)
    assert decoder.notes == (
        "cuda_graphs: off for batches of 257, 512, which the model decodes by its own step: the "
        "graph takes up to 256 sequences",
    )


def test_experts_that_the_model_itself_computes_are_noted() -> None:
    notes: list[str] = []
    session: Any = SimpleNamespace(codes_cache=False, device="cuda", add_note=notes.append, decode_with=lambda _: None)
    session.model = SimpleNamespace(
        graph_decoder=SimpleNamespace(layers=[SimpleNamespace(mlp=torch.nn.Identity())] * 2)
    )
    CudaGraphs().on_open(session)
    assert notes == [
        "cuda_graphs: no kernel of optkit computes what Identity computes. The model's own code does, which is slower"
    ]


def test_it_is_off_on_the_cpu(tiny_model: Callable[[str], Path]) -> None:
    assert CudaGraphs().describe("cpu") == "cuda_graphs: off on cpu"
    assert CudaGraphs().describe("cuda") == "cuda_graphs: on"
    plain, graphs = open_session(tiny_model("llama")), open_session(tiny_model("llama"), [CudaGraphs()])
    tokens = torch.arange(12).reshape(2, 6)
    assert graphs.generate(tokens, 4).equal(plain.generate(tokens, 4))  # type: ignore[union-attr]


def test_a_field_is_refused_since_there_are_none() -> None:
    with pytest.raises(RecipeError, match=r"cuda_graphs has no fields: `- cuda_graphs`\.$"):
        load_recipe("model: x/y\nstages: [{cuda_graphs: true}]\n")
