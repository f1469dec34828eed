"""With `--json`, stdout is one document whatever happens, and nothing that libraries, models or
children print is in it.
"""

import ast
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from optkit_cli.main import COMMANDS, main

from optkit import comparison
from optkit.errors import ResourceError, SourceError
from optkit.processes import commands as processes
from optkit.processes.signals import Terminated
from tests.support.changes import change_json
from tests.support.fresh_python import environment, python

ROOT = Path(__file__).parents[2]
FIELDS = ["status", "kind", "exit_status", "message", "where", "why", "remedy", "problems"]


def commands_with_json() -> list[tuple[tuple[str, ...], click.Command]]:
    """Return every command, below a word or not, that takes `--json`."""
    found = []
    for name in COMMANDS:
        command = import_module(f"optkit_cli.{name}").command
        below = command.commands.items() if isinstance(command, click.Group) else ()
        found += [((name, word), each) for word, each in below] or [((name,), command)]
    return [(words, each) for words, each in found if any("--json" in parameter.opts for parameter in each.params)]


def failed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return the document of a command that must fail; stderr says its message too."""
    capsys.readouterr()
    status = main([*words, "--json"])
    out, err = capsys.readouterr()
    document: dict[str, Any] = json.loads(out)
    assert sorted(document) == sorted(FIELDS)
    assert (document["status"], document["exit_status"]) == ("error", status)
    assert status
    assert all(line in err for line in document["message"].splitlines())
    return document


def test_every_command_that_works_on_models_has_it() -> None:
    assert {words[0] for words, _ in commands_with_json()} == {*COMMANDS} - {"bom", "explain", "init", "schema", "sign"}


@pytest.mark.parametrize(
    ("words", "command"), commands_with_json(), ids=lambda value: "-".join(value) if isinstance(value, tuple) else ""
)
def test_every_command_says_its_failure(
    words: tuple[str, ...],
    command: click.Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(**_arguments: object) -> None:
        raise SourceError("it broke", where="there", why="It was old", remedy="Buy a new one")

    monkeypatch.setattr(command, "callback", fail)
    monkeypatch.setitem(os.environ, "OPTKIT_STORE", str(tmp_path))
    monkeypatch.setitem(os.environ, "OPTKIT_STORE_REMOTE", "memory://there")
    given = {
        "list": ["models"],
        "eval": ["x", "--evals", "y"],
        "push": ["x", "y"],
        "doctor": [],
        "env": [],
        "history": [],
        "store": [],
    }.get(words[0], ["x"])
    said = failed(capsys, *words, *given)
    assert said["message"] == "there: it broke. It was old. Buy a new one."
    assert [said[name] for name in ("kind", "where", "why", "remedy")] == [
        "SourceError",
        "there",
        "It was old",
        "Buy a new one",
    ]


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (ResourceError("memory ran out"), "ResourceError", 1),
        (KeyboardInterrupt(), "Interrupted", 130),
        (Terminated(), "Terminated", 143),
        (MemoryError(), "ResourceError", 1),
        (OSError(errno.ENOSPC, "No space"), "ResourceError", 1),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), "OSError", 1),
        (ZeroDivisionError("division by zero"), "Bug", 1),
        (SystemExit(0), "Bug", 1),
        (EOFError("the file ended"), "Bug", 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_kind_of_failure_has_its_document(
    error: BaseException, kind: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_words: object, **_fields: object) -> None:
        raise error

    monkeypatch.setattr(comparison, "compare", fail)
    said = failed(capsys, "compare", "x")
    assert (said["kind"], said["exit_status"], said["problems"]) == (kind, status, [])


@pytest.mark.parametrize(
    "words",
    [
        ["frobnicate"],
        ["run"],
        ["run", "x", "--device", "gpu"],
        ["list", "models?"],
        ["store"],
        ["store", "show", "--none"],
        [],
    ],
)
def test_a_wrong_command_line_has_its_document(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = failed(capsys, *words)
    assert (said["kind"], said["exit_status"]) == ("UsageError", 2)


def test_the_problems_of_a_recipe_are_a_list_with_their_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("model: smollm2-135m\nstages:\n  - cats: {}\nevals: []\ngatse: {}\n", encoding="utf-8")
    for words in (["run", str(recipe)], ["plan", str(recipe)], ["validate", str(recipe)]):
        said = failed(capsys, *words)
        assert (said["kind"], said["exit_status"]) == ("RecipeError", 2)
        assert [(each["file"], each["line"], each["column"]) for each in said["problems"]] == [
            (str(recipe), 3, 5),
            (str(recipe), 5, 1),
        ]
        assert "Did you mean 'cast'?" in said["problems"][0]["message"]


def test_recipes_without_problems_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "llama_int4", "llama_nf4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"status": "ok", "recipes": ["llama_int4", "llama_nf4"]}


def test_help_is_text_also_beside_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--json", "--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: optkit run")


def test_text_that_is_no_unicode_is_escaped() -> None:
    done = python("-m", "optkit_cli.main", "store", "show", "--json", OPTKIT_STORE=os.fsdecode(b"/none/a\xff"))
    assert json.loads(done.stdout)["root"] == os.fsdecode(b"/none/a\xff")


NOISY = """
import ctypes, os, subprocess, sys
from optkit_cli import show
from optkit_cli.main import main
from optkit_cli.output import print_json
def noisy(artifact, verbose):
    print("of Python")
    os.write(1, b"of the system\\n")
    ctypes.CDLL(None).printf(b"of C\\n")
    subprocess.run(["echo", "of a child"])
    if artifact.name == "broken":
        raise ValueError
    print_json({"answer": 42})
show.command.callback = noisy
sys.exit(main(["show", sys.argv[1], "--json"]))
"""


@pytest.mark.parametrize(("artifact", "key"), [("whole", "answer"), ("broken", "kind")])
def test_what_libraries_print_is_on_stderr(artifact: str, key: str) -> None:
    done = python("-c", NOISY, artifact)
    assert key in json.loads(done.stdout)
    assert {"of Python", "of the system", "of C", "of a child"} <= {*done.stderr.splitlines()}


STUCK = """
import hashlib, sys
from optkit.processes import signals
from optkit_cli import show
from optkit_cli.main import main
signals.CHILDREN_S = signals.END_S = 0.5
def stuck(**_):
    print("ready", file=sys.stderr, flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
show.command.callback = stuck
sys.exit(main(["show", "x", "--json"]))
"""


def test_a_command_that_has_to_be_ended_says_so() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK], env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    said = json.loads(out)
    assert (said["kind"], said["exit_status"], process.returncode) == ("Terminated", 143, 143)


CHATTY = """
import sys
from transformers.models.llama import modeling_llama
print("a model speaks")
class ChattyForCausalLM(modeling_llama.LlamaForCausalLM):
    def forward(self, input_ids=None, past_key_values=None, **fields):
        print("a model speaks")
        return super().forward(input_ids=input_ids, past_key_values=past_key_values, **fields)
"""


@pytest.mark.usefixtures("warm_children")
def test_what_a_models_own_code_prints_is_in_no_document(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model("llama").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "chatty.py").write_text(CHATTY, encoding="utf-8")
    places = {"AutoModelForCausalLM": "chatty.ChattyForCausalLM"}
    change_json(model / "config.json", architectures=["ChattyForCausalLM"], auto_map=places)
    quick = "prompts: [8], new_tokens: 3, repeats: 2, processes: 2, warmup: 1, limit_s: 1"
    in_children = ["eval", "model", "--evals", "chatty.yaml", "--trust-remote-code", "--json"]
    for words, isolated in ((in_children, "true"), (["run", "chatty.yaml"], "false")):
        recipe = (
            "model: {name: model, trust_remote_code: true}\n"
            f"evals: [footprint, {{throughput: {{{quick}, isolated: {isolated}}}}}]\n"
        )
        (tmp_path / "chatty.yaml").write_text(recipe, encoding="utf-8")
        assert main([*words, "--device", "cpu", "--store", str(tmp_path / words[0])]) == 0
        out, err = capfd.readouterr()
        assert "a model speaks" in err
        assert "a model speaks" not in out
        assert "--json" not in words or json.loads(out)["verdict"] == "PASS"


def test_processes_are_started_in_one_place() -> None:
    """There, stdout is ours only if a caller says so."""
    for file in (*(ROOT / "optkit").rglob("*.py"), *(ROOT / "evals").rglob("*.py"), *(ROOT / "cli").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("subprocess.run", "subprocess.Popen"):
                where = f"{file.relative_to(ROOT)}:{node.lineno}"
                told = {"stdout", "capture_output"} & {each.arg for each in node.keywords}
                assert told or where.startswith("optkit/processes/commands.py"), where


def test_the_output_of_a_process_is_no_result(capfd: pytest.CaptureFixture[str]) -> None:
    process = processes.start(["echo", "of a child"])
    process.wait()
    processes.end_group(process)
    assert capfd.readouterr() == ("", "of a child\n")
