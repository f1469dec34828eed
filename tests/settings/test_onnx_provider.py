"""The setting `onnx_provider`: what computes, in which order, with how many threads."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from optkit.devices.peak_memory import watched_peak
from optkit.errors import MissingPackageError, OptkitError, StageError
from optkit.pipeline import plan
from optkit.session import open_session
from optkit.session.onnx_session import OnnxSession
from optkit.settings.onnx_provider import OnnxProvider

TinyOnnx = Callable[[str, str], Path]


def test_threads_and_order_reach_onnxruntime(tiny_onnx: TinyOnnx) -> None:
    session = open_session(tiny_onnx("llama", "fp32"), [OnnxProvider(providers=("cpu",), threads=3)])
    assert isinstance(session, OnnxSession)
    assert session.runner.providers == ("CPUExecutionProvider",)
    assert session.runner.opened.session.get_session_options().intra_op_num_threads == 3


@pytest.mark.parametrize(
    ("providers", "package"), [(("openvino", "cpu"), "onnxruntime-openvino"), (("directml",), "onnxruntime-directml")]
)
def test_a_build_that_is_not_installed(tiny_onnx: TinyOnnx, providers: tuple[str, ...], package: str) -> None:
    with pytest.raises(MissingPackageError, match=f"the package `{package}` is not installed"):
        open_session(tiny_onnx("llama", "fp32"), [OnnxProvider(providers=providers)])


def test_a_provider_of_another_device(tiny_onnx: TinyOnnx) -> None:
    with pytest.raises(OptkitError, match="the provider tensorrt does not compute on cpu. Use --device cuda"):
        open_session(tiny_onnx("llama", "fp32"), [OnnxProvider(providers=("tensorrt", "cuda"))])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "it says nothing: set engine, providers or threads"),
        ({"providers": ["cpu", "cpu"]}, "'cpu' is here twice"),
        ({"providers": ["npu"]}, "Input should be 'cpu', 'cuda'"),
        ({"threads": 0}, "greater than or equal to 1"),
    ],
)
def test_fields_that_cannot_be(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OnnxProvider.model_validate(fields)


def test_it_describes_itself() -> None:
    assert (
        OnnxProvider(providers=("tensorrt", "cuda"), threads=8).describe("cuda") == "onnx_provider: tensorrt, "
        "cuda; 8 threads"
    )
    assert OnnxProvider(threads=8).describe("cpu") == "onnx_provider: 8 threads"


def test_it_is_for_onnx_alone(
    tiny_model: Callable[[str], Path], tiny_onnx: TinyOnnx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTKIT_STORE", str(tmp_path / "store"))
    recipe = tmp_path / "recipe.yaml"
    text = "name: tiny\nmodel: {}\nstages:\n  - onnx_provider: {{threads: 2}}\nevals: [footprint]\n"
    recipe.write_text(text.format(tiny_model("llama")))
    with pytest.raises(
        StageError, match="onnx_provider is applied to an ONNX model when it is opened, and .* is a torch model. Put"
    ):
        plan(recipe, device="cpu")
    with pytest.raises(StageError, match="onnx_provider cannot be applied to a torch model. It is for an ONNX model"):
        open_session(tiny_model("llama"), [OnnxProvider(threads=2)])
    recipe.write_text(text.format(Path(shutil.copytree(tiny_onnx("llama", "fp32"), tmp_path / "onnx"))))
    assert plan(recipe, device="cpu").recipe.settings[0].kind == "onnx_provider"


def test_memory_that_torch_does_not_see() -> None:
    with watched_peak("cuda", "others hold it") as peak:
        pass
    assert (peak.size_bytes, peak.unknown) == (None, "others hold it")
