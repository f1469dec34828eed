import shutil
import warnings
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from pydantic import ValidationError

from optkit.errors import MissingPackageError, StageError
from optkit.model.compiling import RECOMPILE_LIMIT, WAITING
from optkit.model.shape import ModelShape
from optkit.settings import compile as compile_stage
from optkit.settings.compile import Compile


class Model:
    def __init__(self, attention: str = "sdpa") -> None:
        self.config = SimpleNamespace(_attn_implementation=attention)
        self.compiled: dict[str, Any] | None = None

    def compile(self, **options: Any) -> None:
        self.compiled = options


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The programs and packages that the machine is made to have."""
    there = {"g++", "gcc", "triton"}
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(compile_stage, "find_spec", lambda name: object() if name in there else None)
    return there


@pytest.mark.parametrize(
    ("mode", "passed"), [("default", None), ("reduce-overhead", "reduce-overhead"), ("max-autotune", "max-autotune")]
)
def test_the_model_is_compiled_where_that_pays(mode: str, passed: str | None) -> None:
    setting, model = Compile.model_validate({"mode": mode}), Model()
    assert setting.on_load(model, "cuda:1") is model
    assert model.compiled == {"mode": passed, "dynamic": False, "fullgraph": False}
    assert torch._dynamo.config.recompile_limit >= RECOMPILE_LIMIT
    assert setting.describe("cuda:1") == f"compile: {mode}"
    assert setting.load_kwargs("cuda") == {}


def test_whole_graphs_and_any_shape_are_passed_on() -> None:
    setting, model = Compile(fullgraph=True, dynamic=True), Model()
    setting.on_load(model, "cuda")
    assert model.compiled == {"mode": None, "dynamic": True, "fullgraph": True}
    assert setting.describe("cuda") == "compile: default, fullgraph, dynamic"


def test_elsewhere_it_is_off_and_says_so() -> None:
    model = Model()
    assert Compile().on_load(model, "cpu") is model
    assert model.compiled is None
    assert Compile().describe("cpu") == "compile: off on cpu (devices: cuda)"


def test_no_compiler(tools: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tools -= {"g++", "gcc"}
    with pytest.raises(
        StageError, match=r"^compile on cpu: there is no C\+\+ compiler\. .*Install g\+\+, or take cpu out of `devices`"
    ):
        Compile(devices=("cpu",)).on_load(Model(), "cpu")
    with pytest.raises(StageError, match=r"^compile on cuda: there is no C compiler"):
        Compile().on_load(Model(), "cuda")
    monkeypatch.setenv("CXX", "my-cxx")
    with pytest.raises(StageError, match=r"there is no C\+\+ compiler my-cxx \(\$CXX\)"):
        Compile(devices=("cpu", "cuda")).on_load(Model(), "cpu")


def test_a_plan_refuses_it_without_a_compiler(tools: set[str]) -> None:
    shape = ModelShape({}, {})
    Compile().check(shape, "cuda")
    tools -= {"g++", "gcc"}
    Compile().check(shape, "cpu")
    with pytest.raises(StageError, match=r"^compile on cpu: there is no C\+\+ compiler"):
        Compile(devices=("cpu",)).check(shape, "cpu")
    tools.discard("triton")
    with pytest.raises(MissingPackageError, match="`triton` is not installed"):
        Compile().check(shape, "cuda")


def test_no_triton(tools: set[str]) -> None:
    tools.discard("triton")
    with pytest.raises(MissingPackageError, match="`triton` is not installed"):
        Compile().on_load(Model(), "cuda")


def test_wrong_fields() -> None:
    for fields in ({"mode": "fast"}, {"devices": []}, {"devices": ["tpu"]}, {"dynamic": "perhaps"}):
        with pytest.raises(ValidationError):
            Compile.model_validate(fields)


def test_flash_attention_would_attend_to_the_empty_cache() -> None:
    with pytest.raises(
        StageError, match=r"^compile: a compiled step cannot use flash_attention_2\. .*Use sdpa or flex_attention"
    ):
        Compile().on_load(Model("flash_attention_2"), "cuda")
    assert Compile().on_load(Model("flash_attention_2"), "cpu").compiled is None


def test_only_the_advice_on_tensorfloat32_is_silenced() -> None:
    def say(text: str, module: str = "torch._inductor.compile_fx") -> None:
        warnings.warn_explicit(text, UserWarning, "compile_fx.py", 1, module)

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        Compile().on_load(Model(), "cuda")
        say("TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled.")
        say("another warning")
        say("TensorFloat32 tensor cores", "elsewhere")
    assert [str(warning.message) for warning in heard] == ["another warning", "TensorFloat32 tensor cores"]


def test_no_graph_has_products_that_wait() -> None:
    for _ in range(2):
        Compile().on_load(Model(), "cuda")
    assert torch._inductor.config.custom_should_partition_ops == [WAITING]
    import_module("transformers.integrations.moe")
    assert torch.ops.transformers.grouped_mm_fallback.default.name() == WAITING


def test_flex_attention_has_no_compiled_step_on_the_cpu() -> None:
    with pytest.raises(
        StageError,
        match=r"^compile: a compiled step cannot use flex_attention on the CPU\. .*Use sdpa, or take cpu out",
    ):
        Compile(devices=("cpu",)).on_load(Model("flex_attention"), "cpu")
