"""Find a recipe by its path or, for those that come with optkit, by its name."""

from __future__ import annotations

from pathlib import Path

import optkit
from optkit.errors import UsageError, did_you_mean


def built_in_recipes() -> dict[str, Path]:
    """Return the recipes that come with optkit by name: from the package when installed, from the checkout otherwise."""
    package = Path(optkit.__file__).parent
    for folder in (package / "_recipes", package.parent / "recipes"):
        if found := {path.stem: path for path in sorted(folder.glob("*.yaml"))}:
            return found
    return {}


def find_recipe(text: str) -> Path:
    """Return the file that `text` names. Raises UsageError where there is none."""
    path = Path(text)
    if path.is_file():
        return path
    known = built_in_recipes()
    if text in known:
        return known[text]
    if path.is_dir():
        raise UsageError("is a directory", where=text, remedy="Name the recipe file in it")
    raise UsageError(f"there is no such file, and no recipe of that name comes with optkit.{did_you_mean(path.stem, known)}", where=text)


def first_comment(path: Path) -> str:
    """Return the first comment line of a recipe: what it is for, in one line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return (
        next((line.lstrip("# ").strip() for line in lines if line.lstrip("# ").strip()), "") if lines and lines[0].startswith("#") else ""
    )
