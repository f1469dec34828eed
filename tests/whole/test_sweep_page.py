"""docs/howto/sweep.md: its recipe is searched by its commands, with a tiny model and few trials."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from optkit_cli.main import main
from ruamel.yaml import YAML

from optkit.recipe.matrix_reading import load_matrix
from optkit.sweep import run as sweeping
from optkit.sweep.record import read_record
from tests.support.pages import ROOT, blocks, optkit_commands
from tests.support.sweeps import Here

SWEEP = ROOT / "docs" / "howto" / "sweep.md"
PAGE = SWEEP.read_text(encoding="utf-8")
(RECIPE,) = (block.text for block in blocks(SWEEP, "yaml"))
COMMANDS = [words[1:] for words in optkit_commands(SWEEP) if words[1:3] == ["sweep", "search.yaml"]]


def test_the_page_counts_the_combinations() -> None:
    assert f"This one has {len(load_matrix(RECIPE).combinations())} combinations" in PAGE


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_searches_run(
    words: list[str], tmp_path: Path, tiny_model: Callable[[str], Path], letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = YAML(typ="safe").load(RECIPE) | {"model": str(tiny_model("llama"))}
    asked["evals"][0]["perplexity"] = {"dataset": str(letters), "window": 32, "windows": 4}
    (tmp_path / "search.yaml").write_text(json.dumps(asked))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPTKIT_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(sweeping, "LocalExecutor", Here)
    words = ["3" if word == "12" else word for word in words]
    assert main([*words, "--device", "cpu", "--quiet", "--json"]) in (0, 3)
    record = read_record(tmp_path / "artifacts" / "search")
    assert record
    assert [entry.status for entry in record.entries] == ["done"] * 3
