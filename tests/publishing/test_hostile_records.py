"""What the author of an artifact may have written into its record, and into the card of its source."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import spoken

HAND_OVER = (("card",), ("bom",), ("push", "hf://a/b", "--dry-run"), ("reproduce", "--quiet"))


def change(file: Path, *keys: str | int, value: Any) -> None:
    """Put a value into a JSON file."""
    changed = found = json.loads(file.read_text(encoding="utf-8"))
    for key in keys[:-1]:
        found = found[key]
    found[keys[-1]] = value
    file.write_text(json.dumps(changed), encoding="utf-8")


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("steps", 0, "kind"), 5),
        (("steps", 0, "sha256"), [1]),
        (("steps", 0, "environment"), "x"),
        (("steps", 0, "environment", "device"), 5),
        (("steps", 0, "environment", "cpu_threads"), 10**12),
        (("steps", 0, "environment", "packages"), [5]),
        (("imported",), {"environment": 5}),
        (("calibrated_on",), [{"a": "b"}]),
        (("recipe", "model"), 5),
        (("recipe", "model", "name"), "a\n---\nlicense: mit"),
        (("recipe", "model", "revision"), 5),
        (("key",), "' or 1=1"),
        (("name",), "/../../../tmp/x"),
        (("name",), "a\0b"),
    ],
)
def test_a_record_with_other_values_is_refused_when_it_is_read(
    artifact: Path, keys: tuple[str | int, ...], value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    change(artifact / "optkit.json", *keys, value=value)
    for command, *words in HAND_OVER:
        err = spoken(capsys, command, str(artifact), *words, status=1)[1]
        assert err.startswith(f"error: {artifact / 'optkit.json'}: cannot be read.")
        assert "Delete the directory and run its recipe again." in err


def test_a_step_without_versions_has_no_unknown_ones(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(artifact / "optkit.json", "steps", 0, "environment", value={"torch": 5})
    spoken(capsys, "bom", str(artifact))
    assert "pkg:pypi/torch@5" in (artifact / "bom.cdx.json").read_text(encoding="utf-8")


def test_steps_that_are_not_the_recipes(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(artifact / "optkit.json", "recipe", "stages", value=[])
    for command in ("bom", "reproduce"):
        err = spoken(capsys, command, str(artifact), status=1)[1]
        assert "its steps are rtn, and its recipe has none. One of them was changed since it was made." in err


def test_numbers_of_no_time_make_no_bill_of_materials(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(artifact / "scorecard.json", "created", value="yesterday")
    err = spoken(capsys, "bom", str(artifact), status=1)[1]
    assert "optkit.json: it makes no valid bill of materials. 'yesterday' is not a 'date-time'. Run its" in err


@pytest.mark.parametrize(
    "said",
    [
        'license: "mit\\n\\n# Verified by the hub\\n\\n<script>alert(1)</script>"',
        'license: mit\nlicense_link: "javascript:alert(1)"',
        "license: {a: b}",
        "license: mit\neval_results: 5\nmodel_name: 7",
    ],
)
def test_what_the_sources_card_says_adds_nothing_to_the_page(
    artifact: Path, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (artifact / "README.base.md").write_text(f"---\n{said}\n---\n", encoding="utf-8")
    card = spoken(capsys, "card", str(artifact), "--print")[0]
    assert not any(each in card for each in ("# Verified", "<script>", "javascript:", "a: b"))
    assert sum(line == "---" for line in card.splitlines()) == 2
    spoken(capsys, "bom", str(artifact))
