"""Find a recipe by path or by the name of a shipped one, and read its text."""

from __future__ import annotations

import difflib
import stat
import sys
from pathlib import Path

from optkit.common.files import is_directory, is_file, mode_of, remedy_of
from optkit.errors import Problem, RecipeError

LARGEST_BYTES = 1_000_000
SUFFIXES = (".yaml", ".yml")
STANDARD_INPUT = "-"


def shipped_recipes() -> dict[str, Path]:
    """Return name -> file of the recipes that come with optkit."""
    return {path.stem: path for path in sorted(_shipped("recipes").glob("*.yaml"))}


def glossary() -> str:
    """Return the text of the glossary (Markdown)."""
    return (_shipped("docs") / "glossary.md").read_text(encoding="utf-8")


def _shipped(name: str) -> Path:
    package = Path(__file__).parents[1]
    return package / f"_{name}" if (package / f"_{name}").is_dir() else package.parent / name


def find_recipe(source: Path | str) -> Path:
    """Return the file of a recipe, given its path or the name of a shipped one.
    Raises RecipeError with the nearest names.
    """
    path = Path(source)
    if is_file(path) or is_stream(path):
        return path
    if is_directory(path):
        inside = ", ".join(file.name for file in sorted(path.iterdir()) if file.suffix in SUFFIXES)
        named = inside or "it holds no .yaml file"
        raise _refused(path, f"this is a directory, not a recipe. Name a file in it: {named}.")
    shipped = shipped_recipes()
    if path.parent == Path() and path.name.removesuffix(".yaml") in shipped:
        return shipped[path.name.removesuffix(".yaml")]
    files = path.parent.glob("*") if is_directory(path.parent) else ()
    known = {name: name for name in shipped} | {file.stem: str(file) for file in files if file.suffix in SUFFIXES}
    near = difflib.get_close_matches(path.name.removesuffix(path.suffix if path.suffix in SUFFIXES else ""), known, n=1)
    hint = f"Did you mean '{known[near[0]]}'?" if near else f"Shipped recipes: {', '.join(shipped)}."
    if not near and path.suffix in SUFFIXES:
        hint = f"There is no file {path.absolute()}. `optkit list recipes` names the shipped ones."
    raise _refused(path, f"there is no such recipe. {hint}")


def is_stream(path: Path) -> bool:
    """Say whether a recipe comes through a pipe, a terminal or standard input (`-`).
    Such a recipe can be read once.
    """
    mode = mode_of(path)
    return str(path) == STANDARD_INPUT or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)


def read_text(path: Path) -> str:
    """Return the text of a recipe file.
    Raises RecipeError if it is too large, unreadable or not UTF-8.
    """
    try:
        if str(path) == STANDARD_INPUT:
            content = sys.stdin.buffer.read(LARGEST_BYTES + 1)
        else:
            with path.open("rb") as file:
                content = file.read(LARGEST_BYTES + 1)
        if len(content) > LARGEST_BYTES:
            raise _refused(path, f"more than {LARGEST_BYTES:,} bytes are too many for a recipe. Name the YAML file.")
    except OSError as error:
        remedy = remedy_of(error)
        raise _refused(path, f"cannot be read: {error.strerror}.{remedy and f' {remedy}.'}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        message = f"the byte 0x{content[error.start]:02x} is not UTF-8 text. Save the file as UTF-8."
        raise RecipeError([Problem(message, str(path), line, column)]) from error


def _refused(path: Path, message: str) -> RecipeError:
    return RecipeError([Problem(message, str(path))])
