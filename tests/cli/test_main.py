"""The command line as a whole: what it imports, how it fails, how it stops."""

import ast
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from optkit_cli import validate
from optkit_cli.failures import failure_of
from optkit_cli.main import COMMANDS, main

from optkit.errors import MissingPackageError, OptkitError, Problem, RecipeError, StageError, UsageError
from optkit.processes.signals import Terminated
from tests.support.fresh_python import environment

ROOT = Path(__file__).parents[2]


def python(code: str, **settings: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **settings,
    )


def modules_of(code: str) -> set[str]:
    """Return the modules that a fresh Python has imported when it has run this."""
    _, err = python(f"{code}; import sys; print({{*sys.modules}}, file=sys.stderr)").communicate(timeout=60)
    return set(ast.literal_eval(err.splitlines()[-1]))


def loaded_by(*words: str) -> set[str]:
    """Return the top-level packages that a command line imports."""
    found = modules_of(f"from optkit_cli.main import main; main({list(words)!r})")
    return {module.partition(".")[0] for module in found}


def test_help_answers_at_once_because_it_imports_little() -> None:
    nothing = modules_of("pass")
    packages = {module.partition(".")[0] for module in nothing} | sys.stdlib_module_names
    assert loaded_by("--help") - packages == {"click", "optkit", "optkit_cli"}
    assert len(modules_of("from optkit_cli.main import main; main(['--help'])") - nothing) < 190


def test_commands_that_only_read_import_no_torch(
    tiny_run: Path, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTKIT_STORE", f"{tiny_run}/store")
    lists = [["list", each] for each in ("stages", "evals", "datasets", "models", "recipes")]
    commands = [
        *lists,
        ["explain", "gptq"],
        ["schema"],
        ["validate", *map(str, (ROOT / "recipes").glob("*.yaml"))],
        ["plan", f"{tiny_run}/tiny.yaml"],
        ["init", "new.yaml", "--model", "smollm2-135m"],
        *[[each, str(artifact)] for each in ("show", "compare", "card")],
        ["report", str(artifact), "--out", "page.html"],
        ["history", "--where", "size_bytes<=2x"],
        ["store", "show"],
    ]
    code = f"""
import sys
from optkit_cli.main import main
for words in {commands}:
    status = main(words)
    print(words[:2], status, {{"torch", "transformers"}} & {{*sys.modules}}, file=sys.stderr)
"""
    _, err = python(code, cwd=tmp_path).communicate()
    assert err.splitlines() == [f"{words[:2]} 0 set()" for words in commands]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.partition("Commands:")[2].splitlines()
    listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line.strip()}
    assert tuple(listed) == COMMANDS
    assert not any(summary.endswith("...") for summary in listed.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "-h"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: optkit {command}")
    assert "--debug" in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "optkit 0.1.0\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rnu", "x"], "error: There is no command 'rnu'. Did you mean 'run'?"),
        (["--json", "run", "x"], "error: --json belongs behind the command: optkit run --json ..."),
        (["--jsn", "run", "x"], "error: No such option '--jsn'"),
        (["--json"], "error: No such option '--json'"),
        (["frobnicate"], "error: There is no command 'frobnicate'. Known: "),
        (["run", "--modle", "x"], "(Did you mean one of: '--model', '--remote'?)"),
        (["run"], "error: Missing argument 'RECIPE'."),
        (["run", "x", "--device", "gpu"], "'gpu' is not a device. Use cpu, cuda or cuda:N."),
        (["run", "x", "--set", "seed"], "'seed' has no '='. Write it as stages.0.gptq.group_size=32."),
        (["run", "x", "--data", "/nowhere"], "Directory '/nowhere' does not exist."),
        (["run", "x", "--data=~/nowhere"], f"Directory '{Path.home()}/nowhere' does not exist."),
        (
            ["run", "x", "--out", "\udcff"],
            "error: b'\\xff' is not UTF-8 text. Names are kept in JSON, which is. Rename it.",
        ),
        (["run", "\ud800"], "error: '\\ud800' is not UTF-8 text."),
        (["list", "models?"], "is not one of 'stages', 'evals', 'recipes', 'datasets', 'models'"),
        (["eval", "m"], "error: Missing option '--evals'. It is: A recipe, shipped (e.g. llama_int4) or yours,"),
        (["compare"], "error: Missing argument 'ARTIFACT...'."),
    ],
)
def test_usage_errors_say_what_to_type(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["kind"] == "UsageError" if "--json" in words else out == ""
    assert said in err
    assert err.splitlines()[-1].startswith("Try: optkit")
    assert "Traceback" not in err


def test_words_that_a_narrow_locale_cannot_hold_are_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsencode", lambda word: word.encode("latin-1", "surrogateescape"))
    for name in ("é", "→"):
        assert main(["validate", f"{name}.yaml"]) == 2
        assert f"{name}.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (StageError("NaN", where="gptq", remedy="Stop"), 1, "error: gptq: NaN. Stop.\n"),
        (UsageError("no"), 2, "error: no.\n"),
        (
            RecipeError([Problem("bad", "r.yaml", 3, 5), Problem("worse", "r.yaml", 4, 1)]),
            2,
            "error: r.yaml:3:5: bad.\nerror: r.yaml:4:1: worse.\n",
        ),
        (
            MissingPackageError("onnx", where="export"),
            1,
            "error: export: the package `onnx` is not installed. Run: pip install 'onnx'.\n",
        ),
        (click.Abort(), 130, "interrupted; finished steps are kept, run the same command again to go on\n"),
        (KeyboardInterrupt(), 130, "interrupted; finished steps are kept, run the same command again to go on\n"),
        (Terminated(signal.SIGHUP), 129, "terminated; finished steps are kept, run the same command again to go on\n"),
        (Terminated(), 143, "terminated; finished steps are kept, run the same command again to go on\n"),
        (
            MemoryError(),
            1,
            "error: out of memory. Run on a machine with more of it, or a recipe with smaller batches.\n",
        ),
        (
            OSError(errno.ENOSPC, "No space"),
            1,
            "error: the output: the disk is full. Free some space, or use another disk.\n",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/x/y"),
            1,
            "error: /x/y: Permission denied. Change its rights with chmod, or ask its owner to.\n",
        ),
        (OSError(errno.EIO, "Input/output error", "/x/y"), 1, "error: /x/y: Input/output error.\n"),
    ],
)
def test_failures_are_one_clean_message(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = failure_of(error)
    failure.say()
    assert failure.exit_status == status
    assert capsys.readouterr().err == said


def test_optkit_alone_shows_its_help_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Usage: optkit")
    assert err.count("Usage:") == 1


def test_a_closed_stdout_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["list", "models"]) == 0


def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_arguments: object) -> None:
        raise error

    monkeypatch.setattr(validate.command, "callback", fail)


def test_an_unexpected_error_is_called_a_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(ZeroDivisionError("division\nby zero"), monkeypatch)
    assert main(["validate", "x"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ZeroDivisionError at test_main.py:")
    assert line.endswith(
        ": division by zero. This is a bug in optkit. Run the command again with --debug to see the traceback."
    )


@pytest.mark.parametrize("words", [["--debug", "validate", "x"], ["validate", "x", "--debug"]])
@pytest.mark.parametrize("error", [OptkitError("mine"), ZeroDivisionError("yours")])
def test_debug_shows_the_traceback(
    words: list[str], error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(error, monkeypatch)
    assert main(words) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    assert main(["validate", "x"]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_sigterm_is_left_as_it_was() -> None:
    before = signal.getsignal(signal.SIGTERM)
    main(["--version"])
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("words", [["list", "evals", "--json"], ["list", "evals"]])
def test_a_closed_pipe_is_no_error(words: list[str]) -> None:
    process = python(
        f"import sys; from optkit_cli.main import main; sys.stdin.read(); sys.exit(main({words}))",
        stdin=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate("", timeout=60)
    assert err == ""


@pytest.mark.parametrize("words", [["list", "evals", "--json"], ["list", "evals"]])
def test_a_full_disk_behind_stdout_is_told(words: list[str]) -> None:
    process = python(
        f"import os, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); "
        f"from optkit_cli.main import main; sys.exit(main({words}))"
    )
    _, err = process.communicate(timeout=60)
    assert err == "error: the output: the disk is full. Free some space, or use another disk.\n"
    assert process.returncode == 1


@pytest.mark.parametrize("what", ["stages", "evals", "recipes", "datasets", "models"])
def test_list_prints_names_and_what_they_are(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", what, "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert known
    assert main(["list", what]) == 0
    shown = capsys.readouterr().out
    assert {line.split()[0] for line in shown.splitlines() if not line.startswith(" ")} == set(known)


def test_one_broken_plug_in_hides_no_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from optkit.recipe import registry

    monkeypatch.setitem(registry.STAGES, "broken", "no_such_module:Broken")
    assert main(["list", "stages", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert known["broken"].startswith("error: the stage 'broken' cannot be imported")
    assert not known["cast"].startswith("error")
    assert known["sdpa"] == "short for `attention: {implementation: sdpa}`"


def test_schema_is_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["$schema"].startswith("https://json-schema.org/")
