"""The tree is what docs/understand/architecture.md says: few loose modules, and files that can be read at once."""

import ast
import re
import tomllib
import warnings
from itertools import groupby
from pathlib import Path
from statistics import median

import grimp
import networkx
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("optkit", "cli", "evals")
LONGEST, USUAL = 350, 110
LONGEST_SENTENCE = 25
"""In words."""


def sources() -> list[Path]:
    return sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))


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


def test_files_are_short_enough_to_be_read_at_once() -> None:
    lines = {
        path: len(path.read_text(encoding="utf-8").splitlines())
        for path in (*sources(), *(ROOT / "tests").rglob("*.py"))
    }
    assert {path.relative_to(ROOT).as_posix(): count for path, count in lines.items() if count > LONGEST} == {}
    assert median(lines[path] for path in sources()) <= USUAL


def test_every_module_begins_with_a_short_sentence() -> None:
    for path in sources():
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        words = re.split(r"[.!?](?:\s|$)", said)[0].split()
        assert 0 < len(words) <= LONGEST_SENTENCE, f"{path.relative_to(ROOT)} begins with: {' '.join(words)}"


def test_the_architecture_page_shows_the_tree_in_its_layers() -> None:
    """A line is `number  name  sentence`; a folder's name ends with a slash."""
    page = (ROOT / "docs" / "understand" / "architecture.md").read_text(encoding="utf-8")
    shown = re.findall(r"^ ?(\d+)  (\w+/?)  +(\S.*)$", page, re.MULTILINE)
    there = {f"{path.parent.name}/" for path in (ROOT / "optkit").glob("*/__init__.py")}
    assert {name for _, name, _ in shown} == there | {path.stem for path in modules(ROOT / "optkit")}
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract.get("containers") == ["optkit"])
    assert [
        {name.rstrip("/") for _, name, _ in level} for _, level in groupby(shown, key=lambda line: int(line[0]))
    ] == [set(re.split(r"\s*[|:]\s*", layer)) for layer in layers]


@pytest.mark.parametrize(
    "folder",
    [
        "optkit/stages",
        "optkit/settings",
        "optkit/packed_tensors",
        "optkit/model/formats",
        "optkit/kernels",
        "optkit/verification/workers",
        "optkit/sweep/executors",
        "optkit/publishing/targets",
        "evals/optkit_evals",
    ],
)
def test_an_extension_folder_shows_the_smallest_example(folder: str) -> None:
    page = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert examples
    for example in examples:
        ast.parse(example)
    for place in re.findall(r"\b((?:optkit|evals|cli|tests)/[\w/.]*\w)", page):
        made_up = {match[1] for match in re.finditer(r"# (\S+\.py)$", page, re.MULTILINE)}
        assert place in made_up or (ROOT / place).exists(), place


def test_a_warning_at_a_line_of_ours_fails_a_test() -> None:
    with pytest.raises(FutureWarning, match="^of ours$"):
        warnings.warn("of ours", FutureWarning, stacklevel=1)
    with warnings.catch_warnings(record=True) as shown:
        warnings.warn_explicit("of a library", FutureWarning, "library.py", 1, module="library.part")
    assert [str(each.message) for each in shown] == ["of a library"]


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = grimp.build_graph("optkit", exclude_type_checking_imports=True)
    arrows = networkx.DiGraph(
        (module, found) for module in graph.modules for found in graph.find_modules_directly_imported_by(module)
    )
    assert networkx.is_directed_acyclic_graph(arrows), networkx.find_cycle(arrows)
