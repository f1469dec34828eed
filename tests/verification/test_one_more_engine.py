"""An engine of another package is one file and one entry point: `optkit verify` asks it like its own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from optkit_cli.main import main

from optkit.common.plug_ins import plugged_in
from optkit.errors import OptkitError
from optkit.verification.registry import engine_names
from optkit.verification.result_file import read_loading
from tests.support.publishing import published

ENGINE = """
from pathlib import Path
from optkit.verification.engines import Engine

ZEROS = Engine("zeros", str(Path(__file__).with_name("optkit_zeros_worker.py")), ("pytest",), {})
"""
WORKER = """
import json
from pathlib import Path

PACKAGES = ("pytest",)


def missing(request, versions):
    return [] if versions else ["pytest"]


def answer_to(request):
    config = json.loads((Path(request["directory"]) / "config.json").read_text())
    shape = (len(request["tokens"]), config["vocab_size"])
    with open(request["logits"], "wb") as file:
        file.write(bytes(4 * shape[0] * shape[1]))
    return {"device": "cpu", "dtype": "float32", "logits_shape": shape, "generated": [0] * request["new_tokens"]}
"""


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return what installs the engine under a name, as a package would."""

    def install(name: str) -> None:
        (tmp_path / "optkit_zeros.py").write_text(ENGINE, encoding="utf-8")
        (tmp_path / "optkit_zeros_worker.py").write_text(WORKER, encoding="utf-8")
        metadata = tmp_path / "optkit_zeros-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: optkit-zeros\nVersion: 1.0\n", encoding="utf-8"
        )
        (metadata / "entry_points.txt").write_text(f"[optkit.engines]\n{name} = optkit_zeros:ZEROS\n", encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        plugged_in.cache_clear()

    yield install
    plugged_in.cache_clear()


def test_it_is_asked_and_what_it_computes_is_compared(
    plug_in: Callable[[str], None],
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    artifact = published(tiny_model("llama"), tmp_path / "out")
    plug_in("zeros")
    assert main(["verify", str(artifact.directory), "--engine", "zeros", "--tokens", "8", "--device", "cpu"]) == 3
    assert "1 of 1" not in capsys.readouterr().out
    (loading,) = read_loading(artifact)
    assert (loading.engine, loading.verdict, loading.version) == ("zeros", "disagrees", pytest.__version__)
    assert loading.mean_kl is not None
    assert loading.mean_kl > 0.01


def test_its_name_stands_after_those_of_optkit_in_help(
    plug_in: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    plug_in("zeros")
    assert main(["verify", "--help"]) == 0
    assert f"[{'|'.join(engine_names())}]" in "".join(capsys.readouterr().out.split())
    assert engine_names()[-1] == "zeros"


def test_a_name_that_is_taken(plug_in: Callable[[str], None]) -> None:
    plug_in("vllm")
    with pytest.raises(OptkitError) as refused:
        engine_names()
    assert str(refused.value) == (
        "the engine 'vllm' is there twice: optkit.verification.engines:VLLM of optkit and optkit_zeros:ZEROS of "
        "optkit-zeros. The name could mean either. Uninstall one of them: pip uninstall optkit-zeros."
    )
