"""The package that docs/howto/extend.md shows runs as it says."""

import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from optkit.common import plug_ins
from optkit.recipe.recipe import load_recipe
from optkit.stage import Context
from tests.support.pages import ROOT, blocks

PAGE = ROOT / "docs" / "howto" / "extend.md"


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the page's plug-ins, as pip would: their modules and the metadata of their pyproject.toml."""
    for block in blocks(PAGE, "python"):
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    whole, of_the_eval = (tomllib.loads(block.text)["project"] for block in blocks(PAGE, "toml"))
    project = {**whole, "entry-points": {**whole["entry-points"], **of_the_eval["entry-points"]}}
    metadata = tmp_path / "optkit_clip-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    points = [
        f"[{group}]\n{name} = {target}\n"
        for group, named in project["entry-points"].items()
        for name, target in named.items()
    ]
    (metadata / "entry_points.txt").write_text("".join(points), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("optkit_clip", "optkit_lengths"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    plug_ins.plugged_in.cache_clear()
    yield
    plug_ins.plugged_in.cache_clear()


@pytest.mark.usefixtures("plug_in")
def test_the_plug_in_does_what_it_says(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    recipe = load_recipe({"model": "smollm2-135m", "stages": [{"clip": {"deviations": 1.5}}]})
    (entry,) = recipe.transforms
    source, target = tiny_model("llama"), tmp_path / "clipped"
    target.mkdir()
    report = entry.value.run(source, target, Context())

    before, after = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    clipped = [name for name in before if name.endswith("_proj.weight")]
    assert report.changed == len(clipped) == 3 * 7
    assert before.keys() == after.keys()
    for name in before:
        expected = (
            before[name].clamp(-1.5 * before[name].std(), 1.5 * before[name].std()) if name in clipped else before[name]
        )
        assert expected.equal(after[name])
    assert (target / "config.json").is_file()


@pytest.mark.usefixtures("plug_in")
def test_the_plug_in_is_checked_like_our_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from optkit_cli.main import main

    (tmp_path / "r.yaml").write_text("model: smollm2-135m\nstages:\n  - clip: {deviations: -1}\n", encoding="utf-8")
    assert main(["validate", str(tmp_path / "r.yaml")]) == 2
    assert f"{tmp_path}/r.yaml:3:" in capsys.readouterr().err
    assert main(["list", "stages"]) == 0
    assert "Clip the weights of linear layers to a few standard deviations." in capsys.readouterr().out


@pytest.mark.usefixtures("plug_in")
def test_the_eval_counts(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    from optkit import pipeline

    recipe = load_recipe({"name": "r", "model": str(tiny_model("llama")), "evals": [{"lengths": {"sentence": "a b"}}]})
    scorecard = pipeline.run(recipe, out=tmp_path / "out", store=tmp_path / "store", device="cpu")
    assert [row.metric.name for row in scorecard.rows] == ["sentence_tokens"]
    assert scorecard.rows[0].metric.value >= 1
