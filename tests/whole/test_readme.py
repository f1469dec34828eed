"""What the README shows is true: its commands exist, its recipe is valid, its plug-in runs."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from optkit_cli.main import COMMANDS, optkit
from safetensors.torch import load_file

from optkit.common import plug_ins
from optkit.recipe.recipe import load_recipe
from optkit.stage import Context

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, containing: str = "") -> list[str]:
    return [text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if containing in text]


def command_lines() -> list[list[str]]:
    """Return the words of every `optkit ...` line in a console block and in the table of commands."""
    shown = [
        line.removeprefix("$ ").partition("#")[0]
        for text in blocks("console")
        for line in text.splitlines()
        if line.startswith("$ optkit")
    ]
    return [shlex.split(re.split(r"[>|]", line)[0]) for line in [*shown, *re.findall(r"`(optkit [^`]*)`", README)]]


@pytest.mark.parametrize("words", command_lines(), ids=" ".join)
def test_commands_exist_and_take_these_options(words: list[str]) -> None:
    name = words[1]
    if name in {"COMMAND", "RECIPE"}:
        return
    context = optkit.make_context("optkit", ["--help"], resilient_parsing=True)
    command = optkit.get_command(context, name)
    assert command is not None
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_readme(name: str) -> None:
    assert f"| `optkit {name}" in README


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    asked = re.findall(r"^\$ make (\w+)", README, re.MULTILINE)
    assert asked == ["run", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in asked)


def test_extras_are_those_of_the_package() -> None:
    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    )
    sentence = re.search(r"with extras by purpose:\s(.*?)\.\s", README, re.DOTALL)
    assert sentence is not None
    assert set(re.findall(r"`([a-z-]+)`", sentence[1])) == extras - {"test"}


def test_the_recipe_is_valid() -> None:
    (text,) = blocks("yaml")
    recipe = load_recipe(text)
    assert [entry.kind for entry in recipe.stages] == ["rtn", "attention"]
    assert recipe.gates == {"perplexity": "<= 1.10x", "size_bytes": "<= 0.5x"}


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the README's plug-in, as pip would: a module and the metadata of its pyproject.toml."""
    (module,) = blocks("python", "class Clip")
    (settings,) = blocks("toml")
    project = tomllib.loads(settings)["project"]
    (tmp_path / "optkit_clip.py").write_text(module, encoding="utf-8")
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
    monkeypatch.delitem(sys.modules, "optkit_clip", raising=False)
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
