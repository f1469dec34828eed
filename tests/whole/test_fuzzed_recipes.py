"""Recipes, overrides, gates and texts, damaged at random: read, or refused in words."""

import json
from pathlib import Path
from random import Random

import click
import pytest
from optkit_cli.options import assignment, device
from optkit_cli.store import age, size

from optkit.common.byte_sizes import size_bytes
from optkit.recipe.gates import parse_gate
from optkit.recipe.recipe import load_recipe
from optkit.source.texts import TextSource
from tests.support import mutations
from tests.support.fuzzing import damages, read_or_refused

RECIPE = """\
name: mine
description: a recipe
model: {name: smollm2-135m}
seed: 3
stages:
  - gptq:
      bits: 4
      group_size: 32
      calibration: {dataset: wikitext2, samples: 16, sequence_length: 128}
      overrides: {"re:.*down_proj": {bits: 8}}
  - sdpa
  - kv_cache: {dtype: int8}
evals:
  - perplexity: {dataset: wikitext2, window: 512, windows: 4}
  - divergence
  - throughput: {batch_sizes: [1, 4], prompts: [128], new_tokens: 16}
  - footprint
gates:
  perplexity: "<= 1.10x"
  size_bytes: "<= 0.5x"
  "decode_tokens_per_s[batch=1, prompt=128]": ">= 1.2x"
"""


@damages(120)
def test_recipes(draw: Random) -> None:
    read_or_refused(lambda: load_recipe(mutations.damaged_text(RECIPE, draw)))


@damages(60)
def test_recipes_as_mappings(draw: Random) -> None:
    from optkit.recipe.yaml_places import read_yaml

    data = mutations.damaged_json(read_yaml(RECIPE, "r.yaml").data, draw)
    read_or_refused(lambda: load_recipe(json.dumps(data)))
    if isinstance(data, dict):
        read_or_refused(lambda: load_recipe(data))


@damages(60)
def test_overrides(draw: Random) -> None:
    path = draw.choice(
        (
            "seed",
            "stages.0.gptq.group_size",
            "stages.1",
            "evals.0.perplexity.window",
            "gates.perplexity",
            "model.name",
            "name",
        )
    )
    assignment = mutations.damaged_text(f"{path}={json.dumps(draw.choice(mutations.ODD_VALUES))}", draw)
    read_or_refused(lambda: load_recipe("llama_int4", overrides=[assignment]))


@damages(300)
def test_gates_and_sizes(draw: Random) -> None:
    for parse, valid in (
        (lambda text: parse_gate("perplexity", text), "<= 1.10x"),
        (lambda text: parse_gate("size_bytes", text), "<= 1.5 GiB"),
        (lambda text: parse_gate(text, "<= 1"), "decode_tokens_per_s[batch=1]"),
        (size_bytes, "20.5 GiB"),
    ):
        try:
            parse(mutations.damaged_text(valid, draw))
        except ValueError:
            continue
    for kind, valid in ((age, "30d"), (size, "20GB"), (device, "cuda:0"), (assignment, "a.b=c")):
        try:
            kind(mutations.damaged_text(valid, draw))
        except click.UsageError:
            continue


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
@damages(150)
def test_texts(tmp_path: Path, name: str, draw: Random) -> None:
    valid = "".join(
        json.dumps({"text": f"Line {number} — ünïcode.", "other": [1, {"a": None}]}) + "\n" for number in range(5)
    ).encode()
    (tmp_path / name).write_bytes(mutations.damaged_bytes(valid, draw))
    source = TextSource(dataset=str(tmp_path / name))
    read_or_refused(lambda: source.pinned(None).documents(None))
    field = mutations.damaged_json({"text": "a", "other": [1]}, draw)
    (tmp_path / name).write_bytes(json.dumps(field).encode("utf-8", "surrogatepass"))
    read_or_refused(lambda: source.pinned(None).documents(None))
