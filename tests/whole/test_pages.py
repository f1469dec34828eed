"""What README and docs show is true: each command, recipe and program in them is run or validated.

Every page gets a directory with the files that its blocks are titled with, and small stand-ins for
the artifacts and models that it names. Commands that take minutes are read and not run.
"""

import ast
import importlib
import importlib.util
import json
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from optkit_cli.main import COMMANDS, main, optkit
from ruamel.yaml import YAML

from optkit import pipeline
from optkit.recipe.matrix_reading import load_matrix
from optkit.recipe.recipe import load_recipe
from optkit.recipe.registry import names_of
from tests.support.changes import change_json
from tests.support.pages import (
    PAGES,
    ROOT,
    SHELLS,
    Block,
    anchors,
    blocks,
    commands,
    links,
    mentioned_commands,
    optkit_commands,
    scripts,
    shell_lines,
    yaml_of,
)

QUICK = {"validate", "list", "schema", "show", "compare", "report", "store", "plan"}
"""Commands that are run; the others are read alone."""
LANGUAGES = SHELLS | {"", "text", "yaml", "python", "json", "jsonl", "toml", "mermaid", "diff", "html"}
LANGUAGES |= {"csharp", "cpp", "dockerfile", "cmake"}
"""The last ones have no reader here."""
GENERATED = ROOT / "docs" / "reference"
"""Written when the site is built, which checks the links to it."""
PLACES = r"(?:artifacts|release|models)/[\w./-]*\w"
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"])
RECIPE = """\
attribution: false
model: {model}
stages:
  - rtn: {{group_size: 32}}
evals:
  - footprint
  - perplexity: {{dataset: {text}, window: 64, windows: 4}}
  - divergence: {{dataset: {text}, window: 64, windows: 4}}
  - throughput: {{prompts: [8], new_tokens: 4, isolated: false, repeats: 2, limit_s: 1}}
"""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture(scope="session")
def small_artifact(tiny_model: Callable[[str], Path], letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an artifact of a tiny model, with a number of each kind in its scorecard."""
    place = tmp_path_factory.mktemp("artifact")
    recipe = load_recipe(RECIPE.format(model=tiny_model("llama"), text=letters))
    pipeline.run(recipe, out=place / "out", store=place / "store", device="cpu")
    return place / "out"


@pytest.fixture
def place(
    page: Path,
    small_artifact: Path,
    tiny_model: Callable[[str], Path],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Return the directory in which a page's commands are run."""
    monkeypatch.setenv("OPTKIT_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("OPTKIT_ENVS", str(tmp_path / "envs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "recipe.yaml").write_text("model: smollm2-135m\nstages: [{rtn: {group_size: 32}}]\n", encoding="utf-8")
    text = "\n".join(block.text for block in blocks(page, *SHELLS, "python", "yaml"))
    for name in {*re.findall(PLACES, text), "artifacts/llama_int4", "artifacts/llama_int4_rtn"}:
        file = tmp_path / name
        source = small_artifact
        if "onnx" in name and page.stem == "serve-onnx":
            source = request.getfixturevalue("tiny_onnx")("llama", "int4")
        _copy(source, file.parent if file.suffix in {".json", ".onnx"} else file)
    for name in re.findall(r"(?:--model |model[:=] ?\"?)(\./[\w./-]*[\w-])", text):
        _copy(tiny_model("mixtral" if "moe" in name else "llama"), tmp_path / name)
        change_json(tmp_path / name / "config.json", max_position_embeddings=4096)
    for name in re.findall(r"--data (\S+)", text):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    for block in blocks(page):
        if block.title and block.executed:
            file = tmp_path / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
    return tmp_path


def _copy(source: Path, target: Path) -> None:
    if not target.exists():
        shutil.copytree(source, target)


@every_page
def test_blocks_say_their_language(page: Path) -> None:
    assert [str(block) for block in blocks(page) if block.language not in LANGUAGES] == []
    assert [str(block) for block in blocks(page, "") if block.title] == []


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        if target.is_relative_to(GENERATED):
            continue
        assert target.exists(), f"{path} is not there"
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{path}#{anchor} is not there"


@every_page
def test_commands(page: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in optkit_commands(page):
        shown, arguments = " ".join(words), words[1:]
        said = _parsed(arguments, shown).params
        if arguments[0] in {"run", "sweep", "plan"}:
            _read(said, shown)
        if arguments[0] in QUICK and _quick(said) and "s3://" not in shown:
            assert main(arguments) in {0, 3, 4}, f"{shown}\n{capsys.readouterr().err}"


@every_page
def test_commands_in_sentences(page: Path) -> None:
    """They may leave out what they work on."""
    context = click.Context(optkit, info_name="optkit")
    for words in mentioned_commands(page):
        if words[1] not in {"COMMAND", "RECIPE"}:
            command: Any = optkit.get_command(context, words[1])
            assert command is not None, words
            if isinstance(command, click.Group) and len(words) > 2 and not words[2].startswith("-"):
                command = command.get_command(context, words[2])
            known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
            assert {word for word in words if word.startswith("--")} <= known, words


def _parsed(arguments: list[str], shown: str) -> click.Context:
    """Return what a command line says; its options are there, and their values are what they have to be."""
    group: Any = optkit
    context = click.Context(group, info_name="optkit")
    try:
        while isinstance(group, click.Group) and not arguments[0].startswith("-"):
            name, group, arguments = group.resolve_command(context, arguments)
            context = click.Context(group, parent=context, info_name=name)
        if {"--help", "-h", "--version"} & {*arguments} or isinstance(group, click.Group):
            return context
        made: click.Context = group.make_context(context.info_name, list(arguments), parent=context.parent)
        return made
    except click.ClickException as error:
        raise AssertionError(f"{shown}: {error.format_message()}") from error


def _read(said: dict[str, Any], shown: str) -> None:
    """Check the recipe of a command; capital letters stand for any."""
    if said.get("recipe", "RECIPE").isupper():
        return
    try:
        load_matrix(said["recipe"], said["overrides"], said["model"]).combinations()
    except Exception as error:
        raise AssertionError(f"{shown}: {error}") from error


def _quick(said: dict[str, Any]) -> bool:
    """Say whether a command can be run here: it names no placeholder and no model that is elsewhere."""
    words = [str(word) for value in said.values() for word in (value if isinstance(value, tuple | list) else [value])]
    model = said.get("model")
    return not any(re.fullmatch(r"[A-Z_]{3,}", word) for word in words) and (
        "overrides" not in said or (model is not None and Path(model).exists())
    )


@every_page
def test_other_commands(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lines = [line for block in blocks(page, *SHELLS) for line in shell_lines(block)]
    titles = {block.title for block in blocks(page)}
    for words in [words for line in lines for words in commands(line)]:
        if words[0] == "make":
            assert [word for word in words[1:] if "=" not in word and f"\n{word}:" not in makefile] == []
        if words[0] == "python" and len(words) > 1 and words[1].endswith(".py"):
            assert words[1] in titles or (ROOT / words[1]).exists(), words
    for extras in re.findall(r"optkit\[([\w,-]+)\]", page.read_text(encoding="utf-8")):
        assert {*extras.split(",")} <= EXTRAS, extras


@every_page
def test_data(page: Path, place: Path) -> None:
    for block in blocks(page, "yaml"):
        data = yaml_of(block)
        pipelines = list(scripts(data))
        if not pipelines and block.executed:
            _valid(block, data)
    for block in blocks(page, "json"):
        json.loads(block.text)
    for block in blocks(page, "jsonl"):
        assert all(json.loads(line) for line in block.text.splitlines()), str(block)
    for block in blocks(page, "toml"):
        tomllib.loads(block.text)


def _valid(block: Block, data: Any) -> None:
    """Check a recipe, or a part of one: what is left out is filled in."""
    if isinstance(data, list):
        names = {next(iter(entry)) if isinstance(entry, dict) else entry for entry in data}
        data = {"evals" if names <= {*names_of("eval")} else "stages": data}
    data = {"model": "smollm2-135m", **data}
    if ("gates" in data and "evals" not in data) or {*data} == {"model", "matrix"}:
        return  # limits and axes of a recipe that is not here
    try:
        load_matrix(json.dumps(data, indent=1)).combinations()
    except Exception as error:
        raise AssertionError(f"{block}: {error}") from error


@every_page
def test_programs(page: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(place)
    for block in blocks(page, "python"):
        code = compile(block.text, str(block), "exec")
        there = [_imported(node) for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.ImportFrom)]
        tops = {name.partition(".")[0] for name in re.findall(r"^(?:import|from) ([\w.]+)", block.text, re.MULTILINE)}
        if block.executed and all(there) and all(importlib.util.find_spec(name) for name in tops):
            exec(code, {"__name__": "__main__" if not block.title else "module"})


def _imported(node: ast.ImportFrom) -> bool:
    """Say whether a module is installed; if it is ours, the names are in it."""
    name = node.module or ""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        return False
    if name.partition(".")[0] in {"optkit", "optkit_cli", "optkit_evals"}:
        module = importlib.import_module(name)
        assert [each.name for each in node.names if not hasattr(module, each.name)] == []
    return True


def test_every_command_and_extra_is_on_a_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in COMMANDS if f"optkit {name}" not in text] == []
    assert [name for name in EXTRAS - {"test"} if f"`{name}`" not in text and f"optkit[{name}]" not in text] == []


QUESTIONS = YAML(typ="safe").load((Path(__file__).parent / "questions.yaml").read_text(encoding="utf-8"))


def test_twenty_questions() -> None:
    assert len(QUESTIONS) == len({each["ask"] for each in QUESTIONS}) == 20


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question["ask"])
def test_a_question_of_newcomers_has_its_answer(question: dict[str, str]) -> None:
    path, _, anchor = question["answer"].partition("#")
    page = ROOT / "docs" / path
    assert page in PAGES
    assert not anchor or anchor in anchors(page)
