"""The ML-BOM of an artifact: valid by CycloneDX's own schema, the same each time, and true."""

import builtins
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optkit import pipeline
from optkit.artifact import read_artifact
from optkit.common.files import sha256_of
from tests.support.changes import change_json
from tests.support.command_line import spoken

schema = pytest.importorskip("cyclonedx.schema")
validation = pytest.importorskip("cyclonedx.validation.json")

RECIPE = """\
name: tiny
description: for the test
model: {model}
seed: 7
stages:
  - prune: {{sparsity: 0.5, calibration: {{dataset: {text}, samples: 2, sequence_length: 8}}}}
  - rtn: {{group_size: 32}}
  - kv_cache: int4
evals:
  - footprint
  - perplexity: {{dataset: python-reference, window: 8, windows: 4}}
"""


@pytest.fixture(scope="module")
def made(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bom")
    (place / "some.txt").write_text("Many words in a row. " * 80, encoding="utf-8")
    recipe = RECIPE.format(model=tiny_model("llama"), text=place / "some.txt")
    pipeline.run(recipe, out=place / "out", store=place / "store", device="cpu")
    return place / "out"


@pytest.fixture
def artifact(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "out")


def bom_of(artifact: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    out, _ = spoken(capsys, "bom", str(artifact))
    assert out == f"{artifact / 'bom.cdx.json'}\n"
    return json.loads((artifact / "bom.cdx.json").read_text(encoding="utf-8"))


def test_it_is_valid_and_the_same_again(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = bom_of(artifact, capsys)
    text = (artifact / "bom.cdx.json").read_text(encoding="utf-8")
    assert validation.JsonStrictValidator(schema.SchemaVersion.V1_7).validate_str(text) is None
    bom_of(artifact, capsys)
    assert (artifact / "bom.cdx.json").read_text(encoding="utf-8") == text
    card = json.loads((artifact / "scorecard.json").read_text(encoding="utf-8"))
    assert said["metadata"]["timestamp"] == card["created"]
    assert said["serialNumber"].startswith(f"urn:uuid:{card['artifact_key'][:8]}-")
    read_artifact(artifact).check()


def test_it_says_what_the_artifact_is_made_of(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = bom_of(artifact, capsys)
    model = said["metadata"]["component"]
    files = {each["name"]: each["hashes"][0]["content"] for each in model["components"]}
    assert "config.json" in files
    assert files == {name: sha256_of(artifact / name) for name in files}
    record = read_artifact(artifact).record
    assert set(files) == set(record.files)
    by_type = {kind: [each for each in said["components"] if each["type"] == kind] for kind in ("data", "library")}
    assert [(each["name"], each["data"][0]["description"]) for each in by_type["data"]] == [
        ("some.txt", "calibration"),
        ("python-reference", "evaluation"),
    ]
    assert record.calibrated_on[0]["revision"] == f"sha256:{by_type['data'][0]['hashes'][0]['content']}"
    assert {"torch", "transformers", "optkit"} <= {each["name"] for each in by_type["library"]}
    (base,) = (each for each in said["components"] if each["bom-ref"] == "base-model")
    assert f"sha256:{base['hashes'][0]['content']}" == record.recipe["model"]["revision"]
    metrics = model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    perplexity = [each for each in metrics if each["type"].startswith("perplexity")]
    assert len(perplexity) == 2
    assert perplexity[1]["slice"].startswith("unmodified model; ")
    assert float(perplexity[0]["confidenceInterval"]["lowerBound"]) <= float(perplexity[0]["value"])
    (workflow,) = said["formulation"][0]["workflows"]
    assert [task["name"] for task in workflow["tasks"]] == ["prune", "rtn"]
    assert workflow["taskDependencies"] == [{"ref": "step:1:rtn", "dependsOn": ["step:0:prune"]}]
    assert str(artifact.parent) not in json.dumps(said)
    assert "licenses" not in model


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("apache-2.0", [{"license": {"id": "Apache-2.0"}}]),
        ("[mit, gpl-3.0]", [{"license": {"id": "MIT"}}, {"license": {"id": "GPL-3.0"}}]),
        ("other\nlicense_name: our-own", [{"license": {"name": "our-own"}}]),
    ],
)
def test_licences_of_the_base_model(
    artifact: Path, capsys: pytest.CaptureFixture[str], written: str, said: list[Any]
) -> None:
    (artifact / "README.base.md").write_text(f"---\nlicense: {written}\n---\n", encoding="utf-8")
    assert bom_of(artifact, capsys)["metadata"]["component"]["licenses"] == said


def test_a_hub_model_has_its_commit(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {"name": "org/name", "revision": "0" * 40}
    change_json(artifact / "optkit.json", lambda record: record["recipe"]["model"].update(told))
    (base, *_) = bom_of(artifact, capsys)["components"]
    assert (base["version"], base["purl"]) == ("0" * 40, f"pkg:huggingface/org/name@{'0' * 40}")


def test_without_the_extra(artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = builtins.__import__

    def none(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("cyclonedx"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", none)
    _, err = spoken(capsys, "bom", str(artifact), status=1)
    assert "bom: the package `cyclonedx-python-lib` is not installed. Run: pip install 'optkit[bom]'" in err
    assert not (artifact / "bom.cdx.json").exists()
