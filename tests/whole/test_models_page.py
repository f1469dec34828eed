"""The page of the zoo: each cell leads to the message that was said, and a message names its models."""

from __future__ import annotations

import json
import re

from docs import models_page
from docs.models_page import GAP, grouped, template


def test_each_number_leads_to_what_was_said_of_the_model_and_the_stage() -> None:
    shown = models_page.zoo_table()
    items = dict(re.findall(r'<li id="why-(\d+)" data-models="([^"]*)"', shown))
    rows = re.findall(r'<tr data-models="([^"]+)">(.*?)</tr>', shown)
    found = [(kind, number) for kind, row in rows for number in re.findall(r"#why-(\d+)>", row)]
    assert len(found) > 1_000
    assert all(kind in items[number].split() for kind, number in found)
    assert {number for _, number in found} == {*items}
    assert len(items) < len(json.loads(models_page.ZOO.read_text(encoding="utf-8"))["reasons"]) / 5


def test_messages_that_differ_in_names_and_sizes_alone_are_one() -> None:
    said = "{0}: model.layers.3.mlp.up: {1} columns of {2}ForCausalLM are not multiples of 32 ({2}, ...). Use {1}."
    rows = {
        kind: {"awq": ("refused", said.format("awq", size, kind.title()))} for kind, size in [("one", 96), ("two", 8)]
    }
    rows["three"] = {"gptq": ("refused", said.format("gptq", 8, "Three")), "rtn": ("refused", "rtn: other words.")}
    first, second = grouped(rows).values()
    assert [*first.models] == ["one", "two", "three"]
    assert [*first.stages] == ["awq", "gptq"]
    assert [*second.said] == ["rtn: other words."]
    same = ("refused", "onnx: it sees images. Leave onnx out.")
    assert len(grouped({"one": {"onnx": same, "onnx_optimize": same}})) == 1
    assert template("llama", "kv_cache window", "kv_cache.window: llama has 3.") == f"{GAP}.window: {GAP} has {GAP}."
