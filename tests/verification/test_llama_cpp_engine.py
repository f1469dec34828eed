"""What llama.cpp, in a process of its own, makes of a GGUF artifact."""

from pathlib import Path

import pytest
from optkit_cli.main import main

from optkit.stages.gguf import Gguf
from optkit.verification.engines import LLAMA_CPP, python_variable
from optkit.verification.result_file import read_loading
from optkit.verification.workers import open_in_llama_cpp
from tests.conftest import TinyModel
from tests.support.publishing import published
from tests.support.running import run_stage


def test_what_is_missing_and_whose_python() -> None:
    assert open_in_llama_cpp.missing({}, {"numpy": "2"}) == ["llama-cpp-python"]
    assert open_in_llama_cpp.missing({}, {"llama-cpp-python": "0.3.36"}) == []
    assert python_variable(LLAMA_CPP.name) == "OPTKIT_LLAMA_CPP_PYTHON"


@pytest.mark.parametrize(("kind", "limit"), [(None, "0.001 (float16 and float16)"), ("Q8_0", "0.1 (")])
@pytest.mark.usefixtures("children_here")
def test_an_artifact_is_verified(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str | None, limit: str
) -> None:
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, of the extra `llama-cpp`")
    pytest.importorskip("gguf", reason="needs gguf, of the extra `gguf`")
    run_stage(Gguf(type=kind), tiny_model("llama"), tmp_path / "model")
    artifact = published(tmp_path / "model", tmp_path / "out")
    status = main(["verify", str(tmp_path / "out"), "--device", "cpu", "--tokens", "40", "--quiet"])
    out, err = (" ".join(each.split()) for each in capsys.readouterr())
    assert status == 0, out + err
    assert "whole, in model.gguf" in out
    assert "loading vllm: it reads safetensors, and this artifact is GGUF" in out
    (found,) = (each for each in read_loading(artifact) if each.verdict == "agrees")
    assert (found.engine, found.same_tokens, found.device) == ("llama.cpp", 16, "cpu")
    assert f"agrees below a mean KL of {limit}" in str(found.compared)
