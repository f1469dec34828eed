"""A recipe that calibrates and measures with images, end to end."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optkit import execute, pipeline
from optkit.errors import SourceError
from optkit.stages.prune_structured import PruneStructured
from tests.support.processors import save_pairs, save_processor
from tests.support.vision_models import save_vision_model

RECIPE = """\
name: sees
model: {model}
stages:
  - prune: {{method: wanda, calibration: {calibration}}}
evals:
  - perplexity: {{dataset: {measured}, images: image, window: 128}}
  - divergence: {{dataset: {measured}, images: image, window: 128}}
  - perplexity: {{dataset: {text}, window: 64, windows: 2}}
gates:
  "perplexity[prompts=images]": "<= 9x"
"""
BLIND = "prune: it read text alone and saw no image, which the model does in use; name some by `images`"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_vision_model("llava", tmp_path_factory.mktemp("llava"))
    save_processor("llava", directory)
    return directory


def run(recipe: str, place: Path) -> pipeline.Scorecard:
    (place / "sees.yaml").write_text(recipe, encoding="utf-8")
    return pipeline.run(place / "sees.yaml", out=place / "out", store=place / "store", device="cpu")


def test_images_from_calibration_to_scorecard(model: Path, letters: Path, tmp_path: Path) -> None:
    (tmp_path / "measured").mkdir()
    measured, pairs = save_pairs(tmp_path / "measured", 2, "row"), save_pairs(tmp_path, 3)
    calibration = f"{{dataset: {pairs}, images: image, samples: 3, sequence_length: 90}}"
    scorecard = run(RECIPE.format(model=model, calibration=calibration, measured=measured, text=letters), tmp_path)
    rows = {(row.metric.name, str(row.metric.labels)): row for row in scorecard.rows}
    seen = rows["perplexity", "{'prompts': 'images'}"]
    assert seen.baseline
    assert [gate.verdict for gate in seen.gates] == ["PASS"]
    assert "2 prompts with 2 images" in seen.metric.protocol
    assert rows["kl_divergence", "{'prompts': 'images'}"].metric.value > 0
    assert "prompts with" not in rows["perplexity", "{}"].metric.protocol
    assert BLIND not in scorecard.notes


def test_only_a_stage_that_sees_images_is_advised_to_name_some(model: Path) -> None:
    step: Any = SimpleNamespace(stage=PruneStructured(remove_layers=1))
    assert execute._blindness(step, model) == (BLIND.removeprefix("prune: ").partition(";")[0],)


def test_text_alone_is_a_note_and_a_damaged_image_stops_the_run(model: Path, tmp_path: Path) -> None:
    recipe = RECIPE.partition("evals:")[0]
    text = "{dataset: python-reference, samples: 2, sequence_length: 32}"
    assert BLIND in run(recipe.format(model=model, calibration=text), tmp_path).notes
    pairs = save_pairs(tmp_path, 3)
    (tmp_path / "1.png").write_bytes(b"no image")
    (tmp_path / "out").rename(tmp_path / "before")
    with pytest.raises(SourceError, match=r"1.png: the image cannot be read"):
        run(recipe.format(model=model, calibration=f"{{dataset: {pairs}, images: image, samples: 3}}"), tmp_path)
