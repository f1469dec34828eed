"""Files that are no scorecards, and scorecards that somebody changed."""

import json
from pathlib import Path
from typing import Any

import pytest

from optkit.errors import ArtifactError
from optkit.scorecard import read_json, to_json
from tests.support.full_scorecards import full_scorecard


def test_json_that_is_no_scorecard(tmp_path):
    path = tmp_path / "scorecard.json"
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_json(path)
    path.write_text("[]")
    with pytest.raises(ArtifactError, match="is not a JSON object|is JSON and no scorecard"):
        read_json(path)
    path.write_text(to_json(full_scorecard()).replace('"schema": 1', '"schema": 2'))
    with pytest.raises(ArtifactError, match="the scorecard has schema 2, and this optkit reads schema 1"):
        read_json(path)
    path.write_text(json.dumps({"schema": 1, "name": 3}))
    with pytest.raises(ArtifactError, match="the scorecard is damaged"):
        read_json(path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"recipe": {"stages": 1.0}}, "'float' object is not iterable"),
        ({"recipe": {"stages": ["rtn"]}}, r'recipe: Value error, stages: "rtn" is no kind with its fields\.'),
        ({"recipe": {"evals": [{"footprint": None}]}}, r'evals: {"footprint": null} is no kind with its fields\.'),
        ({"environment": {"cores": float("inf")}}, "Out of range float values are not JSON compliant"),
    ],
)
def test_json_of_a_scorecard_that_was_changed(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    path = tmp_path / "scorecard.json"
    path.write_text(json.dumps(json.loads(to_json(full_scorecard())) | changed))
    with pytest.raises(ArtifactError, match=f"the scorecard is damaged. .*{said}.* Run its recipe again"):
        read_json(path)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ('"key": "perplexity"', '"key": "<script>"', "'<script>' names no metric"),
        ('"limit": "<= 1.1x"', '"limit": "small"', "'small' is no limit"),
        ('"report": {', '"report": {"calibrated_on": ["c4"], ', '"c4" is not an object'),
        ('"report": {', '"report": {"calibrated_on": 5, ', "it is calibrated on 5"),
    ],
)
def test_parts_that_other_commands_rely_on(tmp_path: Path, name: str, value: str, said: str) -> None:
    path, text = tmp_path / "scorecard.json", to_json(full_scorecard())
    assert name in text
    path.write_text(text.replace(name, value))
    with pytest.raises(ArtifactError, match=f"the scorecard is damaged. .*{said}.* Run its recipe again"):
        read_json(path)
