"""The pipelines of docs/start/ci.md: their commands are run as they stand there, release after release."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml
from ruamel.yaml import YAML

from tests.support.fresh_python import environment as python_environment
from tests.support.pages import ROOT, blocks, scripts, yaml_of

PAGE = ROOT / "docs" / "start" / "ci.md"
RECIPE, GITHUB, GITLAB = (yaml_of(block) for block in blocks(PAGE, "yaml"))


@pytest.fixture
def checkout(tmp_path: Path, tiny_model: Callable[[str], Path]) -> Path:
    """Return a repository with the page's recipe for a tiny model; `pip` there does nothing."""
    words = " ".join(shlex.quote(word) for word in (sys.executable, "-m", "optkit_cli.main"))
    for name, text in (("pip", "exit 0"), ("optkit", f'exec {words} "$@"')):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    recipe = {**RECIPE, "model": str(tiny_model("llama"))}
    with (tmp_path / "recipe.yaml").open("w") as file:
        YAML().dump(recipe, file)
    return tmp_path


def ran(checkout: Path, pipeline: dict[str, Any], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a pipeline's script as its runner does."""
    kept = {name: value for name, value in python_environment().items() if not name.startswith("GITHUB_")}
    path = f"{checkout / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-e", "-c", "\n".join(scripts(pipeline))],
        cwd=checkout,
        env={**kept, "PATH": path, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(("schema", "pipeline"), [("github-workflows", GITHUB), ("gitlab-ci", GITLAB)])
def test_a_pipeline_is_valid_by_its_schema(schema: str, pipeline: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "pipeline.json"
    path.write_text(json.dumps(pipeline), encoding="utf-8")
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_release_after_release(checkout: Path) -> None:
    first = ran(checkout, GITLAB)
    assert first.returncode == 0, first.stderr
    assert "1 of 1 gates pass, 1 skipped" in first.stdout
    reports = GITLAB["optimize"]["artifacts"]["reports"]
    (suite,) = JUnitXml.fromfile(str(checkout / reports["junit"]))
    assert (suite.tests, suite.failures, suite.skipped) == (2, 0, 1)
    assert "optkit_perplexity{" in (checkout / reports["metrics"]).read_text()
    for each in GITLAB["optimize"]["artifacts"]["paths"]:
        assert (checkout / each).is_file()

    (checkout / "release").mkdir()
    shutil.copy(checkout / "artifact" / "scorecard.json", checkout / "release")
    recipe = (checkout / "recipe.yaml").read_text()
    (checkout / "recipe.yaml").write_text(recipe.replace("<= 0.5x", "<= 0.01x"))
    github = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(checkout / "summary.md")}
    second = ran(checkout, GITHUB, **github)
    assert second.returncode == 3, second.stderr
    assert re.search(
        r"^::error file=recipe.yaml,line=\d+,col=\d+,title=size_bytes <= 0.01x::FAIL: ", second.stderr, re.M
    )
    assert "1.000x [1.000, 1.000] | <= 1.01x of previous PASS" in (checkout / "summary.md").read_text()
    (suite,) = JUnitXml.fromfile(str(checkout / "junit.xml"))
    assert (suite.tests, suite.failures, suite.skipped) == (2, 1, 0)
