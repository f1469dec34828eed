"""Attention kernels of the hub: names, pins and refusals with a cache made here; a kernel from a
directory computes what sdpa does.
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoConfig, modeling_flash_attention_utils
from transformers.integrations import hub_kernels
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import import_utils

from optkit.errors import MissingPackageError, OptkitError, RecipeError, SourceError, StageError
from optkit.model.shape import ModelShape
from optkit.plan import make_plan
from optkit.recipe.recipe import load_recipe
from optkit.settings.attention import Attention
from optkit.source import hub_kernels as kernels
from optkit.source.hub_kernels import PACKAGE, AttentionKernel, why_not_function
from optkit.store.store import Store
from tests.support.near import near

NAME, COMMIT = "kernels-community/flash-attn2", "c" * 40
SHAPE = ModelShape({}, {})
KERNEL = """
import torch

def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    groups = q.shape[2] // k.shape[2]
    q, k, v = (states.transpose(1, 2) for states in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    scores = q @ k.mT * (softmax_scale or q.shape[-1] ** -0.5)
    if causal:
        ours, theirs = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(ours, theirs, dtype=torch.bool).triu(theirs - ours + 1), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)

def flash_attn_varlen_func(*arguments, **keywords):
    raise NotImplementedError
"""


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package seems to be there."""
    monkeypatch.setattr(kernels, "unmet", lambda requirements: [])
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packaged: None) -> Path:
    """The hub's cache with one kernel, built for GPUs."""
    root = tmp_path / "hub"
    (root / "kernels--kernels-community--flash-attn2" / "refs").mkdir(parents=True)
    (root / "kernels--kernels-community--flash-attn2" / "refs" / "v3").write_text(COMMIT)
    (
        root
        / "kernels--kernels-community--flash-attn2"
        / "snapshots"
        / COMMIT
        / "build"
        / "torch213-cxx11-cu130-x86_64-linux"
    ).mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.delenv("KERNELS_CACHE", raising=False)
    return root


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packaged: None) -> Path:
    """A kernel in a directory, for the CPU."""
    build = tmp_path / "kernel" / "build" / "torch-cpu"
    build.mkdir(parents=True)
    (build / "__init__.py").write_text(KERNEL)
    metadata = {
        "id": "_tiny_cpu_1",
        "name": "tiny",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (build / "metadata.json").write_text(json.dumps(metadata))
    monkeypatch.setenv("LOCAL_KERNELS", f"other/kernel=/nowhere:me/tiny={tmp_path / 'kernel'}")
    return build


def test_names_are_those_that_transformers_takes() -> None:
    for name in (NAME, f"{NAME}@v1", f"{NAME}:attend", f"{NAME}@{COMMIT}:attend"):
        kernel = AttentionKernel.parse(Attention(implementation=name).implementation)
        assert str(kernel) == name
        assert kernel.repository == NAME
        assert hub_kernels.is_kernel(name)
    for name in ("flash-attn", "a/b/c", "a/b@", "a/b:", "paged|a/b", "a/b@x/y"):
        with pytest.raises(RecipeError, match=r"implementation: .* is not one of 'eager', .* or a kernel of the hub"):
            load_recipe({"model": "smollm2-135m", "stages": [{"attention": {"implementation": name}}]})


@pytest.mark.parametrize(
    "name",
    [NAME, "kernels-community/vllm-flash-attn3", "kernels-community/flash-attn4", "a/mla", "a2/flash", "x/FLASH2"],
)
def test_versions_are_those_that_transformers_takes(name: str) -> None:
    assert AttentionKernel.parse(name)._version == hub_kernels.get_attn_kernel_version(name)
    assert f"kernels>={import_utils.KERNELS_MIN_VERSION}".startswith(PACKAGE.split(",")[0])
    assert import_utils.KERNELS_MAX_VERSION.startswith(PACKAGE.split("<")[1])


def test_the_package_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "unmet", lambda requirements: requirements)
    for refused in (
        lambda: Attention(implementation=NAME).pinned(None),
        lambda: Attention(implementation=NAME).check(SHAPE, "cuda"),
    ):
        with pytest.raises(
            MissingPackageError,
            match=r"^attention: kernels-community/flash-attn2: .*pip install 'kernels>=0\.16,<0\.17'",
        ):
            refused()


def test_a_kernel_is_pinned_to_a_commit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Attention(implementation=NAME).pinned(None).implementation == f"{NAME}@{COMMIT}"
    assert Attention(implementation=f"{NAME}@{COMMIT}:attend").pinned(None).implementation == f"{NAME}@{COMMIT}:attend"
    with pytest.raises(
        SourceError,
        match=r"the kernel is neither here nor to be downloaded.*HF_HUB_OFFLINE.*the revision v7 is not in its",
    ):
        Attention(implementation=f"{NAME}@v7").pinned(None)
    asked = []
    found = SimpleNamespace(
        kernel_info=lambda name, revision: asked.append((name, revision)) or SimpleNamespace(sha="d" * 40)
    )
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: found)
    assert Attention(implementation=NAME).pinned(None).implementation == f"{NAME}@{'d' * 40}"
    assert asked == [(NAME, "v3")]
    assert Attention(implementation="sdpa").pinned(None).implementation == "sdpa"


def test_the_cache_of_kernels_may_be_another(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("KERNELS_CACHE", str(cache))
    assert Attention(implementation=NAME).pinned(None).implementation == f"{NAME}@{COMMIT}"


def test_a_kernel_without_a_build_for_the_device_is_refused_at_plan_time(
    cache: Path, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    recipe = load_recipe({"model": str(tiny_model("llama")), "stages": [{"attention": NAME}]}).pinned(None)
    make_plan(recipe, Store(tmp_path), "cuda")
    message = (
        rf"^attention: the kernel {NAME}@{COMMIT} does not run on cpu\. It was built for "
        r"torch213-cxx11-cu130-x86_64-linux\. Use sdpa"
    )
    with pytest.raises(StageError, match=message):
        make_plan(recipe, Store(tmp_path), "cpu")
    lost = Attention(implementation=f"{NAME}@{'e' * 40}")
    with pytest.raises(
        StageError,
        match=r"is neither here nor to be downloaded\. The hub is switched off .* Load it once with a connection",
    ):
        lost.check(SHAPE, "cuda")
    Attention(implementation=NAME).check(SHAPE, "cpu")


def test_float32_is_refused_on_a_gpu() -> None:
    model, other = opened_with(NAME), opened_with("me/mine")
    with pytest.raises(StageError, match=rf"{NAME} does not compute in float32"):
        Attention(implementation=NAME).on_load(model, "cuda")
    assert Attention(implementation="me/mine").on_load(other, "cuda") is other


def opened_with(implementation: str, kind: str = "llama") -> SimpleNamespace:
    return SimpleNamespace(dtype=torch.float32, config=AutoConfig.for_model(kind, attn_implementation=implementation))


def test_another_kernel_than_the_one_asked_for_is_refused() -> None:
    """transformers has a list of its own for models with attention sinks."""
    with pytest.raises(
        StageError,
        match=r"^attention: me/mine .* of gpt_oss\. transformers takes other/flash for this model instead\. Use eager",
    ):
        Attention(implementation="me/mine").on_load(opened_with("other/flash", "gpt_oss"), "cuda")


@pytest.mark.parametrize(("kind", "argument"), [("gemma2", "softcap"), ("gpt_oss", "s_aux")])
def test_a_kernel_that_leaves_out_what_the_model_asks_for_is_refused(
    kind: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(module: object, query: torch.Tensor, **keywords: object) -> None: ...

    def knowing(
        module: object, query: torch.Tensor, softcap: float | None = None, s_aux: torch.Tensor | None = None
    ) -> None: ...

    for name, function in (("me/forgetful", forgetful), ("me/knowing", knowing)):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, function)
    message = rf"of {kind}\. Its function forgetful has no parameter {argument}, so it leaves out .*\. Use eager"
    with pytest.raises(StageError, match=message):
        Attention(implementation="me/forgetful").on_load(opened_with("me/forgetful", kind), "cpu")
    Attention(implementation="me/knowing").on_load(opened_with("me/knowing", kind), "cpu")
    Attention(implementation="me/forgetful").on_load(opened_with("me/forgetful"), "cpu")


def test_functions_of_flash_attention_are_asked_for_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers gives them what they have a parameter for; sinks have two names."""

    def old(q: torch.Tensor, softmax_scale: float | None = None) -> None: ...

    def new(q: torch.Tensor, softcap: float = 0.0, learnable_sink: torch.Tensor | None = None) -> None: ...

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "me/flash", flash_attention_forward)
    for function in (old, new):
        monkeypatch.setattr(
            modeling_flash_attention_utils, "lazy_import_flash_attention", lambda name, f=function: ((None, f), None)
        )
        said = [why_not_function("me/flash", argument) for argument in ("softcap", "s_aux")]
        assert said == (
            ["", ""]
            if function is new
            else [
                "Its function old has no parameter softcap, so it leaves out the soft cap of the scores",
                "Its function old has no parameter s_aux, so it leaves out attention sinks",
            ]
        )


def test_a_directory_is_pinned_by_its_files(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = Attention(implementation="me/tiny").pinned(None)
    assert pinned.implementation.startswith("me/tiny@local-")
    pinned.check(SHAPE, "cpu")
    with pytest.raises(StageError, match=r"does not run on cuda\. It was built for torch-cpu"):
        pinned.check(SHAPE, "cuda")
    (local / "__init__.py").write_text(f"{KERNEL}\n")
    with pytest.raises(StageError, match=r"holds another kernel than me/tiny@local-.* Its files have changed since"):
        pinned.check(SHAPE, "cpu")
    assert Attention(implementation="me/tiny").pinned(None) != pinned
    monkeypatch.setenv("LOCAL_KERNELS", "me/tiny=/nowhere")
    with pytest.raises(
        SourceError, match=r"\$LOCAL_KERNELS names /nowhere for me/tiny, and there is no such directory"
    ):
        pinned.check(SHAPE, "cpu")
    monkeypatch.setenv("LOCAL_KERNELS", "me/tiny")
    with pytest.raises(SourceError, match=r"\$LOCAL_KERNELS has an entry 'me/tiny'\. Write owner/repository=directory"):
        pinned.check(SHAPE, "cpu")
    monkeypatch.delenv("LOCAL_KERNELS")
    for refused in (lambda: pinned.check(SHAPE, "cpu"), lambda: pinned.pinned(None)):
        with pytest.raises(
            StageError,
            match=r"was one of a local directory\. \$LOCAL_KERNELS names none for it now\. Set LOCAL_KERNELS=me/tiny=",
        ):
            refused()


def test_a_directory_may_be_the_build_itself(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", f"me/tiny={local}")
    Attention(implementation="me/tiny").pinned(None).check(SHAPE, "cpu")


def test_a_kernel_that_cannot_be_loaded(packaged: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ValueError("An error occurred while trying to load from 'me/tiny': no build.\nmore")

    monkeypatch.setattr(hub_kernels, "load_and_register_attn_kernel", broken)
    with pytest.raises(
        StageError, match=r"^attention: the kernel me/tiny cannot be loaded\. An error occurred .* no build\. Use sdpa"
    ):
        Attention(implementation="me/tiny").load_kwargs("cpu")


@pytest.mark.peers
@pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="the package kernels is not installed")
def test_a_kernel_from_a_directory_computes_what_sdpa_does(local: Path, tiny_model: Callable[[str], Path]) -> None:
    from optkit.session import open_session

    tokens = torch.arange(24).reshape(2, 12)
    ours = open_session(tiny_model("llama"), [Attention(implementation="me/tiny").pinned(None)])
    plain = open_session(tiny_model("llama"))
    assert near(ours.logits(tokens), plain.logits(tokens))
    assert ours.generate(tokens, 8).equal(plain.generate(tokens, 8))
    assert ours.attention_kernels(tokens).startswith("me/tiny@local-")
    with pytest.raises(OptkitError, match="the kernel me/none cannot be loaded"):
        open_session(tiny_model("llama"), [Attention(implementation="me/none")])
    with pytest.raises(
        StageError,
        match=r"of gemma2\. Its function flash_attn_varlen_func has no parameter softcap, so it leaves out the",
    ):
        open_session(tiny_model("gemma2"), [Attention(implementation="me/tiny").pinned(None)])
