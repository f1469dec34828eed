"""What shells are offered: through click's own completion, and by the script that a shell runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from optkit_cli.main import COMPLETE, optkit


def offered(*words: str) -> list[tuple[str, str]]:
    *before, typed = words
    return [
        (item.type, item.value) for item in ShellComplete(optkit, {}, "optkit", COMPLETE).get_completions(before, typed)
    ]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with two artifacts and a directory that is none."""
    for name in ("artifacts/int4", "artifacts/int8", "artifacts/logs", "mine"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("artifacts/int4", "artifacts/int8", "mine"):
        (tmp_path / name / "optkit.json").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("ver",), ["verify"]),
        (("run", "llama_nf"), ["llama_nf4", "llama_nf4_lora"]),
        (("validate", "base"), ["baseline"]),
        (("explain", "prune"), ["prune", "prune_structured"]),
        (("explain", "acc_n"), ["acc_norm"]),
        (("init", "--target", ""), ["vllm", "onnx", "transformers", "llama.cpp"]),
        (("list", "st"), ["stages"]),
        (("run", "llama_int4", "--verb"), ["--verbose"]),
    ],
)
def test_names_are_offered(words: tuple[str, ...], values: list[str]) -> None:
    assert [value for _, value in offered(*words)] == values


def test_files_are_offered_where_no_name_begins_so() -> None:
    assert offered("run", "./mi") == [("file", "./mi")]


@pytest.mark.parametrize("command", ["show", "verify", "compare", "report", "card", "push", "eval", "profile"])
def test_artifacts_are_offered(command: str, here: Path) -> None:
    assert [value for _, value in offered(command, "")] == ["mine", "artifacts/int4", "artifacts/int8"]
    assert [value for _, value in offered(command, "artifacts/")] == ["artifacts/int4", "artifacts/int8"]
    assert [value for _, value in offered(command, "artifacts/int8")] == ["artifacts/int8"]
    assert offered(command, "other/") == [("dir", "other/")]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_script_and_nothing_on_stderr(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "optkit_cli.main"],
        env={**os.environ, COMPLETE: f"{shell}_source"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "_optkit_completion" in done.stdout
