"""`optkit verify` on an ONNX artifact, as a user calls it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optkit_cli.main import main

from optkit.artifact import read_artifact
from optkit.verification.onnx_checks import rounds_inputs
from optkit.verification.result_file import read_loading
from tests.support.fake_engine import spoiled
from tests.support.onnx_changes import change_graph
from tests.support.publishing import published

pytest.importorskip("onnx")
TinyOnnx = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def our_own_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine but our own Python's, and the artifact in the working directory."""
    monkeypatch.chdir(tmp_path)
    for engine in ("VLLM", "TRANSFORMERS", "ONNXRUNTIME", "ONNXRUNTIME_GENAI", "OPTIMUM"):
        monkeypatch.delenv(f"OPTKIT_{engine}_PYTHON", raising=False)
    monkeypatch.setenv("OPTKIT_ENVS", str(tmp_path / "envs"))


def verified(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    found = main(["verify", "out", "--device", "cpu", "--tokens", "40", "--quiet", *words])
    out, err = capsys.readouterr()
    assert found == status, out + err
    return " ".join(out.split()), " ".join(err.split())


@pytest.mark.parametrize(
    ("precision", "limit"),
    [("fp32", "1e-05 (float32 and float32)"), ("int4", "0.1 (float32 and float32, rounded activations)")],
)
def test_both_engines_agree_and_the_others_are_not_asked(
    precision: str, limit: str, tiny_onnx: TinyOnnx, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = published(tiny_onnx("llama", precision), tmp_path / "out")
    out, _ = verified(capsys)
    assert "ok opens optkit opens it on cpu, in float32, without its settings (onnxruntime " in out
    assert "transformers not tried" in out
    assert "loading vllm: it reads safetensors, and this artifact is ONNX" in out
    assert out.endswith("PASS 2 of 2 engines agree out")
    kept = {each.engine: each for each in read_loading(artifact)}
    assert list(kept) == ["transformers", "vllm", "onnxruntime", "onnxruntime-genai", "llama.cpp", "optimum"]
    for engine in ("onnxruntime", "onnxruntime-genai"):
        assert (kept[engine].verdict, kept[engine].same_tokens, kept[engine].device, kept[engine].dtype) == (
            "agrees",
            16,
            "cpu",
            "float32",
        )
        assert kept[engine].compared == f"logits after each of 40 tokens; agrees below a mean KL of {limit}"
        assert kept[engine].version


def test_activations_that_are_rounded_are_seen(tiny_onnx: TinyOnnx) -> None:
    from optkit.onnx.directory import OnnxDirectory

    assert rounds_inputs(OnnxDirectory(tiny_onnx("llama", "int4")).graph)
    assert not rounds_inputs(OnnxDirectory(tiny_onnx("llama", "fp32")).graph)


def test_an_engine_that_disagrees(tiny_onnx: TinyOnnx, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published(tiny_onnx("llama", "fp32"), tmp_path / "out")
    python = spoiled(tmp_path)
    out, _ = verified(
        capsys, "--engine", "onnxruntime-genai", "--engine-python", f"onnxruntime-genai={python}", status=3
    )
    assert "DISAGREES" in out
    assert out.endswith("FAIL 0 of 1 engines agree out")


def test_without_genai_config_its_engine_is_not_asked(
    tiny_onnx: TinyOnnx, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(tiny_onnx("llama", "fp32"), tmp_path / "model")
    (model / "genai_config.json").unlink()
    published(model, tmp_path / "out")
    out, err = verified(capsys, "--engine", "onnxruntime", "--engine", "onnxruntime-genai", status=1)
    assert "PASS 1 of 1 engines agree out" in out
    assert (
        err == "error: out: onnxruntime-genai was not asked, there is "
        "no genai_config.json, without which it opens nothing."
    )


def test_an_engine_that_the_user_named_and_that_opens_no_onnx(
    tiny_onnx: TinyOnnx, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(tiny_onnx("llama", "fp32"), tmp_path / "out")
    _, err = verified(capsys, "--engine", "vllm", status=1)
    assert err == "error: out: vllm was not asked, it reads safetensors, and this artifact is ONNX."


def test_damage_is_said_and_no_engine_is_asked(
    tiny_onnx: TinyOnnx, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = published(tiny_onnx("llama", "fp32"), tmp_path / "out")
    (tmp_path / "out" / "model.onnx.data").unlink()
    out, _ = verified(capsys, "--json", status=3)
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert checks["digests"]["detail"] == "model.onnx.data is missing"
    assert not checks["weights"]["ok"]
    assert read_loading(read_artifact(artifact.directory)) == ()


def test_a_graph_that_fails_when_it_runs(
    tiny_onnx: TinyOnnx, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What no check of the files can tell, optkit's own session does."""

    def break_heads(model: Any) -> None:
        attributes = [
            each for node in model.graph.node if node.op_type == "GroupQueryAttention" for each in node.attribute
        ]
        next(each for each in attributes if each.name == "num_heads").i = 8

    model = shutil.copytree(tiny_onnx("llama", "fp32"), tmp_path / "model")
    change_graph(model, break_heads)
    (model / "genai_config.json").unlink()
    published(model, tmp_path / "out")
    out, _ = verified(capsys, status=3)
    assert "!! opens " in out
    assert "query hidden size must be divisible by the grouped head count" in out
