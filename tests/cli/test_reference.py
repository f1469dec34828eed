"""The site's pages about commands, errors and the environment say what is there."""

import ast
import gc
import re
from functools import cache
from pathlib import Path

import pytest
from optkit_cli.explain import found_by
from optkit_cli.main import COMMANDS
from optkit_cli.messages import Message, error_classes, errors_of, messages, messages_of, read_sources
from optkit_cli.reference import reference_pages
from optkit_cli.sources import Sources

from optkit.devices.datasheets import DEVICES
from optkit.scorecard.scorecard import Measured, Scorecard

ROOT = Path(__file__).parents[2]
pages = cache(reference_pages)


def test_every_command_has_its_usage_and_options() -> None:
    headings = re.findall(r"^## `optkit ([\w ]+)`$", pages()["cli"], re.MULTILINE)
    assert [each for each in headings if " " not in each] == list(COMMANDS)
    assert {"store prune", "env build"} <= {*headings}
    run = pages()["cli"].split("## `optkit run`")[1].split("\n## ")[0]
    assert "$ optkit run [OPTIONS] RECIPE" in run
    assert "`--out DIR`\n:   Directory of the artifact" in run


def test_the_scorecard_has_every_field() -> None:
    for model in (Scorecard, Measured):
        assert all(f"`{field.alias or name}`: " in pages()["scorecard"] for name, field in model.model_fields.items())


def test_every_device_is_told_with_its_source() -> None:
    assert all(f"`{name}`: {each.name}, " in pages()["devices"] for name, each in DEVICES.items())
    assert "141 GB at 4.8 TB/s\n:   TFLOP/s: fp32 66.9, " in pages()["devices"]


def test_messages_are_read_with_cause_and_cure() -> None:
    assert len(messages()) > 400
    assert (
        Message(
            "StageError",
            "a compiled step cannot check several tokens",
            "It was compiled for one token at a time and a cache as long as the request",
            "Take compile or speculative out of the recipe",
        )
        in messages()
    )
    assert any("‹" in message.what for message in messages())


WORDS_OF_ANOTHER = {
    "EvalError(why[0])": "of the turn that failed",
    "StageError(planned[0].reason, where=f'all {len(planned)} combinations')": "of the first plan's error",
    "StageError(str(error), where=WHERE, why=error.last_words)": "of the process that ended",
    "place.problem(str(error))": "of an error that gets a place",
    "recipe.value_place(steps).problem(str(error))": "of an error that gets a place",
    "PushError(what, where=where, why=why, remedy=remedy)": "of an error without its secrets",
    "UsageError(found[0].message, where='--choices')": "of a fault",
    "place((*steps, *fault.steps)).problem(fault.message)": "of a fault",
    "super().__init__('\\n'.join((str(problem) for problem in self.problems)))": "of the problems",
}
"""Errors whose words are another's, which is known by itself."""


def test_no_source_is_kept_once_its_messages_are_known() -> None:
    assert messages()
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, Sources)]


def test_no_error_is_made_of_words_that_are_unknown() -> None:
    sources = read_sources()
    made = [call for call in sources.calls if errors_of(call, sources) and call.node.args]
    unknown = {ast.unparse(call.node) for call in made if not [*messages_of(call, sources)]}
    assert len(made) > 500
    assert unknown == WORDS_OF_ANOTHER.keys(), "let the words stand where the call, or one of its callers, has them"


@pytest.mark.parametrize(
    ("error", "what"),
    [
        ("RecipeError", "there is no such recipe. ‹hint›"),  # given to a helper
        ("SourceError", "there are no token embeddings (token_embd.weight)"),  # by one of its callers
        ("StageError", "the Hessian is not positive definite, even with damping ‹HARDEST_DAMPING›"),  # a ValueError
        ("MissingPackageError", "the package `‹package›` is not installed"),  # in the class itself
        ("EvalError", "‹media_type› is no media type"),  # one of several values of a name
        ("RecipeError", "‹value› is no fraction between 0 and 1. Write a whole number to say how many"),  # a validator
    ],
)
def test_words_are_followed_to_the_error(error: str, what: str) -> None:
    assert (error, what) in {(each.error, each.what) for each in messages()}


def test_explain_finds_every_message_by_its_own_words() -> None:
    plain = {each.text: re.sub("‹.*?›|…", "7", each.text) for each in messages()}
    long = {text: words for text, words in plain.items() if sum(map(str.isalpha, words)) > 5 and " " in words}
    assert len(long) > 0.98 * len(plain)
    lost = [text for text, words in long.items() if text not in {each.text for each in found_by(words)}]
    assert lost == []


def test_errors_are_told_by_class_with_their_exit_status() -> None:
    page = pages()["errors"]
    assert re.findall(r"^## `(\w+)`$", page, re.MULTILINE) == [each.__name__ for each in error_classes()]
    assert "Exit status 2." in page.split("## `UsageError`")[1].split("\n## ")[0]
    assert "a compiled step cannot check several tokens\n:   It was compiled for one token at a time" in page


def test_the_pages_on_troubles_quote_what_is_said() -> None:
    pages = (ROOT / "docs" / "howto" / f"{name}.md" for name in ("debug", "resume"))
    page = "".join(page.read_text(encoding="utf-8") for page in pages)
    quoted = [text for text in re.findall(r"^\|[^|`]*`([^`]+)`", page, re.MULTILINE) if " " in text]
    assert quoted
    sources = [
        path.read_text(encoding="utf-8") for folder in ("optkit", "cli") for path in (ROOT / folder).rglob("*.py")
    ]
    assert [text for text in quoted if not any(text in source for source in sources)] == []


def test_every_environment_variable_is_told_and_read() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    told = {name for line in page.splitlines() if line.startswith("`") for name in re.findall(r"`([A-Z0-9_]+)`", line)}
    sources = [path for folder in ("optkit", "cli", "evals") for path in (ROOT / folder).rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in sources]
    read = {name for text in texts if "os.environ" in text or "envvar" in text for name in asked(ast.parse(text))}
    by_engine = {"OPTKIT_VLLM_PYTHON", "OPTKIT_ONNXRUNTIME_GENAI_PYTHON"}
    of_libraries = {"HF_HUB_OFFLINE", "OMP_WAIT_POLICY"}
    assert read <= told
    named = {name for text in texts for name in re.findall(r'"([A-Z_][A-Z0-9_]+)"', text)}
    assert told - read - by_engine - of_libraries <= named, "told of, and in no source"


def asked(tree: ast.Module) -> set[str]:
    """Return the variables that a module names where it reads or sets the environment."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and "os.environ" in ast.unparse(node.func) and node.args:
            found.add(node.args[0])
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            found.add(node.slice)
        elif isinstance(node, ast.keyword) and node.arg == "envvar":
            found.add(node.value)
    return {each.value for each in found if isinstance(each, ast.Constant) and str(each.value).isupper()}
