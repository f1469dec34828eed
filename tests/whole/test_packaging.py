"""The wheel holds what an installed optkit needs and nothing that would get in anybody's way."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names of the files in a freshly built wheel."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True, timeout=120)
    (built,) = folder.glob("optkit-*.whl")
    return set(zipfile.ZipFile(built).namelist())


def test_the_wheel_holds_the_three_packages_whole(wheel: set[str]) -> None:
    for folder in ("optkit", "cli/optkit_cli", "evals/optkit_evals"):
        sources = {path.relative_to((ROOT / folder).parent).as_posix() for path in (ROOT / folder).rglob("*.py")}
        assert sources
        assert sources <= wheel


def test_the_wheel_holds_the_recipes(wheel: set[str]) -> None:
    assert {f"optkit/_recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")} <= wheel
    assert "optkit/_recipes/llama_int4.yaml" in wheel


def test_the_wheel_holds_nothing_else(wheel: set[str]) -> None:
    assert {name.partition("/")[0] for name in wheel} == {
        "optkit",
        "optkit_cli",
        "optkit_evals",
        f"optkit-{PROJECT['version']}.dist-info",
    }


def test_the_license_is_in_the_wheel(wheel: set[str]) -> None:
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in wheel)


def test_the_version_is_said_once() -> None:
    import optkit

    assert optkit.__version__ == PROJECT["version"]
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def names_of(requirements: list[str]) -> set[str]:
    return {canonical(re.split(r"[\s<>=!~;\[]", requirement)[0]) for requirement in requirements}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_constraints_pin_everything_that_the_tests_use() -> None:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    pinned = dict(line.split("==") for line in lines)
    assert len(pinned) == len(lines)
    extras = PROJECT["optional-dependencies"]
    wanted = names_of([*PROJECT["dependencies"], *extras["test"], *extras["demo"], *extras["hub"]]) - {"optkit"}
    assert wanted <= {canonical(name) for name in pinned}


def test_constraints_lie_within_the_ranges() -> None:
    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonical(name): version for name, _, version in (line.partition("==") for line in lines) if version}
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *(each for extra in extras.values() for each in extra)]:
        need = Requirement(text)
        if canonical(need.name) in pinned:
            assert need.specifier.contains(pinned[canonical(need.name)], prereleases=True), text


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert script.read_text(encoding="utf-8").rstrip().endswith("exec make test")
