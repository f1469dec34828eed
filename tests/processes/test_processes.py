"""Python that optkit starts imports nothing from the directory that the user stands in."""

import ast
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import optkit
from optkit.backends import installing
from optkit.onnx.genai_tokenizer import genai_tokens
from optkit.processes.commands import SAFE_PATH, foreign_environment, python_command, python_environment, safe_children
from optkit.reports.doctor.gpu_links import all_reduce_rates
from optkit.stage import Context
from optkit.training.launch import launch
from optkit.verification.engines import versions_in
from tests.support.rank_stages import Together

ROOT = Path(optkit.__file__).parents[1]
DECOYS = (
    "optkit",
    "torch",
    "accelerate",
    "transformers",
    "json",
    "venv",
    "pip",
    "multiprocessing",
    "pickle",
    "socket",
    "vllm",
    "onnx",
)


@pytest.fixture
def witness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a directory with modules that nobody asked for; return the file that any of them
    makes when it is imported.
    """
    desk, witness = tmp_path / "desk", tmp_path / "witness"
    desk.mkdir()
    for name in DECOYS:
        (desk / f"{name}.py").write_text(f"open({str(witness)!r}, 'a').write({name!r})\n", encoding="utf-8")
    monkeypatch.chdir(desk)
    monkeypatch.delenv(SAFE_PATH, raising=False)
    return witness


def test_the_decoys_are_imported_by_a_python_that_is_not_started_so(witness: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv"], check=False, env=foreign_environment(), capture_output=True)
    assert witness.read_text() == "venv"


@pytest.mark.usefixtures("warm_children")
def test_a_training_on_several_devices(witness: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    context = Context(seed=7, workspace=tmp_path / "work")
    assert launch(Together(how="sum"), tmp_path, tmp_path / "target", context, 2, "together").changed == 3
    assert not witness.exists()


def test_processes_that_measure_links(witness: Path) -> None:
    assert all_reduce_rates(2, "gloo", sizes=(1 << 12,))
    assert not witness.exists()
    assert SAFE_PATH not in os.environ


def test_the_tokenizer_of_onnx_runtime_genai(witness: Path, tmp_path: Path) -> None:
    assert genai_tokens(tmp_path, "text") is None  # there is no tokenizer
    assert not witness.exists()


def test_making_an_environment(witness: Path, tmp_path: Path) -> None:
    installing._run(python_command("-m", "venv", "--without-pip", str(tmp_path / "env")), "here", "it failed")
    python = installing.python_of(tmp_path / "env")
    assert python.exists()
    assert (
        installing._run(python_command("-c", "import json; print(json.dumps(1))", python=python), "here", "it failed")
        == "1\n"
    )
    installing._run([str(python), "-c", "import json"], "here", "it failed")  # what an installer starts by itself
    assert not witness.exists()


def test_asking_for_an_engine(witness: Path, tmp_path: Path) -> None:
    assert set(versions_in(sys.executable, ("numpy", "no-such-package"))) == {"numpy"}
    venv.create(tmp_path / "env", with_pip=False)
    assert versions_in(str(tmp_path / "env" / "bin" / "python"), ("numpy",)) == {}
    assert versions_in("false", ("numpy",)) == {}
    assert not witness.exists()


def test_what_libraries_start(witness: Path) -> None:
    with safe_children():
        subprocess.run([sys.executable, "-c", "import json"], check=True)
    assert not witness.exists()


def test_places_to_import_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", "/absolute", "relative"])
    assert python_environment(A="b")["PYTHONPATH"] == os.pathsep.join(["/absolute", str(Path("relative").absolute())])
    assert python_environment(A="b")["A"] == "b"
    monkeypatch.setenv("PYTHONPATH", "/absolute")
    monkeypatch.setenv(SAFE_PATH, "1")
    assert not {"PYTHONPATH", SAFE_PATH} & set(foreign_environment())


def test_no_other_place_starts_python() -> None:
    """`sys.executable` begins no command elsewhere, and `-c` and `-m` belong to `python_command`;
    engines have Pythons of any version.
    """
    known = {ROOT / "optkit/processes/commands.py", ROOT / "optkit/verification/engines.py"}
    sources = {path for part in ("optkit", "cli", "evals") for path in (ROOT / part).rglob("*.py")}
    found = {
        path: lines
        for path in sources - known
        if (lines := starts_of_python(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert not found, f"use optkit.processes.commands.python_command: {found}"
    assert len(sources) > 300


def starts_of_python(tree: ast.Module) -> list[int]:
    """Return the lines in which a list or tuple begins with `sys.executable`, or holds `-c` or
    `-m`.
    """
    lists = [node for node in ast.walk(tree) if isinstance(node, (ast.List, ast.Tuple)) and node.elts]
    return [
        node.lineno
        for node in lists
        if names_python(node.elts[0]) or any(names_python(each, option=True) for each in node.elts)
    ]


def names_python(node: ast.expr, option: bool = False) -> bool:
    if option:
        return isinstance(node, ast.Constant) and node.value in ("-c", "-m")
    return isinstance(node, ast.Attribute) and node.attr == "executable"


def test_the_search_finds_them() -> None:
    assert starts_of_python(ast.parse("run([sys.executable, path])\nrun((python, '-c', code))\n")) == [1, 2]
    assert starts_of_python(ast.parse("python_command('-m', 'x')\nif python == sys.executable: pass")) == []
