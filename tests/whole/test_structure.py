"""The tree is what docs/architecture.md says: few loose modules, and files that can be read at once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST = 420


def modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def test_few_modules_are_in_no_folder() -> None:
    assert len(modules(ROOT / "optkit")) <= 12


@pytest.mark.parametrize("family", ["narrowing", "pruning", "quantizing", "sensitivity", "teaching"])
def test_what_stages_share_knows_no_stage(family: str) -> None:
    stages = {f"optkit.stages.{path.stem}" for path in modules(ROOT / "optkit" / "stages")}
    for path in (ROOT / "optkit" / "stages" / family).glob("*.py"):
        assert not imported(path) & stages, path


def test_every_stage_and_setting_is_registered_by_its_file() -> None:
    from optkit.recipe.registry import EVALS, STAGES

    homes = {place.partition(":")[0] for place in STAGES.values()}
    for folder in ("stages", "settings"):
        assert {f"optkit.{folder}.{path.stem}" for path in modules(ROOT / "optkit" / folder)} <= homes
    assert all(place.startswith("optkit_evals.") for place in EVALS.values())


def test_no_file_is_too_long_to_be_read_at_once() -> None:
    for folder in ("optkit", "cli", "evals"):
        for path in (ROOT / folder).rglob("*.py"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            assert lines <= LONGEST, f"{path.relative_to(ROOT)} has {lines} lines"
