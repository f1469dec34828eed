"""The page of the zoo: each cell leads to the message that was said, and a message names its models."""

import json
import re
from pathlib import Path

import pytest

from docs import models_page
from tests.zoo.table import GAP, Table, template


def test_each_number_leads_to_what_was_said_of_the_model_and_the_stage() -> None:
    shown = models_page.zoo_table()
    items = dict(re.findall(r'<li id="why-(\d+)" data-models="([^"]*)"', shown))
    rows = re.findall(r'<tr data-models="([^"]+)">(.*?)</tr>', shown)
    found = [(kind, number) for kind, row in rows for number in re.findall(r"#why-(\d+)>", row)]
    assert len(found) > 1_000
    assert all(kind in items[number].split() for kind, number in found)
    assert {number for _, number in found} == {*items}


def test_the_table_on_disk_is_what_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read = Table.read()
    monkeypatch.setattr("tests.zoo.table.TABLE", tmp_path / "models.json")
    read.write()
    kept, written = (
        json.loads(path.read_text(encoding="utf-8")) for path in (models_page.ZOO, tmp_path / "models.json")
    )
    assert all(kept[part] == written[part] for part in ("reasons", "rows"))


def test_messages_that_differ_in_names_and_sizes_alone_are_one() -> None:
    said = "{0}: model.layers.3.mlp.up: {1} columns of {2}ForCausalLM are not multiples of 32 ({2}, ...). Use {1}."
    table = Table({}, {})
    for kind, stage, size in (("one", "awq", 96), ("two", "awq", 8), ("three", "gptq", 8)):
        table.add(kind, {stage: ("refused", said.format(stage, size, kind.title())), "cast": ("same", "")})
    table.add("three", {"rtn": ("refused", "rtn: other words.")})
    (reason, other) = table.reasons
    assert table.reasons[reason] == (said.format("awq", 96, "One"), "one")
    assert table.rows["three"] == {"cast": ("same", ""), "rtn": ("refused", other), "gptq": ("refused", reason)}
    same = "onnx: it sees images. Leave onnx out."
    assert template("one", "onnx", same) == template("one", "onnx_optimize", same)
    assert template("llama", "kv_cache window", "kv_cache.window: llama has 3.") == f"{GAP}.window: {GAP} has {GAP}."
