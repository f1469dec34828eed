"""The wheel holds what an installed optkit needs and nothing that would get in anybody's way."""

import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from ruamel.yaml import YAML

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
        assert f"{Path(folder).name}/py.typed" in wheel


def test_the_wheel_holds_the_recipes(wheel: set[str]) -> None:
    assert {f"optkit/_recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")} <= wheel
    assert "optkit/_recipes/llama_int4.yaml" in wheel


def test_the_wheel_holds_the_locks(wheel: set[str]) -> None:
    from optkit.backends.libraries import LIBRARIES

    assert {name for name in wheel if "/locks/" in name} == {f"optkit/backends/locks/{each}.txt" for each in LIBRARIES}


def test_the_wheel_holds_nothing_else(wheel: set[str]) -> None:
    assert {name.partition("/")[0] for name in wheel} == {
        "optkit",
        "optkit_cli",
        "optkit_evals",
        f"optkit-{PROJECT['version']}.dist-info",
    }


def test_the_license_is_in_the_wheel(wheel: set[str]) -> None:
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in wheel)


def test_the_dockerfile_names_what_is_there() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    extras = re.findall(r"\.whl\)\[([\w,-]+)\]", text)
    assert len(extras) == 2
    assert {name for each in extras for name in each.split(",")} <= PROJECT["optional-dependencies"].keys()
    stages = re.findall(r"^FROM (\S+) AS (\w+)$", text, re.MULTILINE)
    assert [name for _, name in stages] == ["wheel", "base", "cpu", "cuda"]
    assert {source for source, _ in stages} == {"python:3.11-slim-bookworm", "base"}
    copied = re.findall(r"^COPY (?!--)(\S+)", text, re.MULTILINE)
    assert all((ROOT / each).exists() for each in copied)


def test_the_glossary_that_explain_reads_is_in_the_wheel(wheel: set[str]) -> None:
    assert "optkit/_docs/glossary.md" in wheel


def test_the_version_is_said_once() -> None:
    import optkit

    assert optkit.__version__ == PROJECT["version"]
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def constraints() -> list[tuple[str, str]]:
    """Return the names and versions of constraints.txt, in its order."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return [(name, version) for name, version in pins]


def names_of(requirements: list[str]) -> set[str]:
    return {canonical(re.split(r"[\s<>=!~;\[]", requirement)[0]) for requirement in requirements}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_constraints_pin_everything_that_the_tests_use() -> None:
    lines = constraints()
    pinned = dict(lines)
    assert len(pinned) == len(lines)
    extras = PROJECT["optional-dependencies"]
    wanted = names_of([*PROJECT["dependencies"], *extras["test"], *extras["demo"], *extras["hub"]]) - {"optkit"}
    assert wanted <= {canonical(name) for name in pinned}


def test_gpus_get_the_onnx_runtime_of_cpus() -> None:
    pinned, extras = dict(constraints()), PROJECT["optional-dependencies"]
    for cpu, gpu in (("onnxruntime", "onnxruntime-gpu"), ("onnxruntime-genai", "onnxruntime-genai-cuda")):
        assert pinned[gpu] == pinned[cpu]
        assert [each.replace(f"{gpu}>", f"{cpu}>") for each in extras["onnx-gpu"] if each.startswith(f"{gpu}>")] == [
            each for each in extras["onnx"] if each.startswith(f"{cpu}>")
        ]


def test_pre_commit_checks_with_the_same_versions() -> None:
    """ruff by its tag; what reads the installed packages runs in .venv, which constraints.txt fills."""
    repos = YAML(typ="safe").load(ROOT / ".pre-commit-config.yaml")["repos"]
    tags = {repo["repo"].rpartition("/")[2]: repo["rev"] for repo in repos if repo["repo"] != "local"}
    assert tags == {"ruff-pre-commit": f"v{dict(constraints())['ruff']}"}
    entries = [hook["entry"] for repo in repos if repo["repo"] == "local" for hook in repo["hooks"]]
    assert entries == [".venv/bin/mypy", ".venv/bin/lint-imports"]


def test_workflows_call_what_a_checkout_calls() -> None:
    jobs = YAML(typ="safe").load(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]
    (job,) = jobs.values()
    called = [step["run"].split()[:2] for step in job["steps"] if "run" in step]
    assert called == [["make", "test"], ["make", "docs"], ["make", "run"]]
    said = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if each.startswith("Programming Language")]
    assert job["strategy"]["matrix"]["python"] == said


def test_a_release_is_built_checked_and_then_published() -> None:
    jobs = YAML(typ="safe").load(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "permissions" not in jobs["build"]
    assert any(step.get("run", "").startswith("make test") for step in jobs["build"]["steps"])


def test_constraints_lie_within_the_ranges() -> None:
    from packaging.requirements import Requirement

    pinned = {canonical(name): version for name, version in constraints()}
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *(each for extra in extras.values() for each in extra)]:
        need = Requirement(text)
        if canonical(need.name) in pinned:
            assert need.specifier.contains(pinned[canonical(need.name)], prereleases=True), text


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert script.read_text(encoding="utf-8").rstrip().endswith("exec make test")
