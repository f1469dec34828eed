"""A stage, a setting and an eval of another package, installed beside optkit, run by the command
line as the built-in ones do. A new format: tests/model/formats/test_formats.py.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.fresh_python import environment, python

Optkit = Callable[..., "subprocess.CompletedProcess[str]"]
STAGE = '''
from pathlib import Path
from typing import ClassVar
from optkit.model.checkpoint import Checkpoint
from optkit.model.writer import CheckpointWriter, copy_companions, write_config
from optkit.stage import Context, Report, Transform

class LouderHead(Transform):
    """Multiply the output layer by a factor."""

    kind: ClassVar[str] = "louder_head"
    factor: float = 2.0

    def run(self, source: Path, target: Path, context: Context) -> Report:
        checkpoint = Checkpoint(source)
        copy_companions(source, target)
        write_config(target, checkpoint.config)
        with CheckpointWriter(target) as writer:
            for name in checkpoint.tensors:
                weight = checkpoint.read_finite(name)
                writer.add(name, weight * self.factor if name == "lm_head.weight" else weight)
        return Report(changed=1)
'''
SETTING = '''
from typing import Any, ClassVar
from optkit.stage import Setting

class CappedLogits(Setting):
    """Keep logits within a limit."""

    kind: ClassVar[str] = "capped_logits"
    exact: ClassVar[bool] = False
    limit: float

    def on_load(self, model: Any, device: str) -> Any:
        model.lm_head.register_forward_hook(lambda module, given, made: made.clamp(-self.limit, self.limit))
        return model
'''
EVAL = '''
from collections.abc import Mapping
from typing import ClassVar
from optkit.measure import Eval, EvalContext, Metric, Session

class LargestLogit(Eval):
    """How far from zero a logit gets."""

    kind: ClassVar[str] = "largest_logit"
    metrics: ClassVar[Mapping[str, str]] = {"largest_logit": "logits"}
    draws: ClassVar[bool] = False
    length: int = 8

    def longest_sequence(self) -> int:
        return self.length

    def run(self, session: Session, context: EvalContext) -> list[Metric]:
        import torch
        value = float(session.logits(torch.arange(self.length)[None]).abs().max())
        said = f"of the tokens 0 to {self.length - 1}"
        return [Metric(name="largest_logit", value=value, unit="logits", higher_is_better=False, protocol=said)]
'''
POINTS = """
[optkit.stages]
louder_head = optkit_loud.stage:LouderHead
capped_logits = optkit_loud.setting:CappedLogits

[optkit.evals]
largest_logit = optkit_loud.eval:LargestLogit
"""
RECIPE = """
name: loud
model: {model}
stages:
  - louder_head: {{factor: 3.0}}
  - capped_logits: {{limit: 0.25}}
evals:
  - largest_logit: {{length: 12}}
gates:
  largest_logit: <= 0.25
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory that holds what pip would install of the package."""
    folder = tmp_path_factory.mktemp("site")
    package, metadata = folder / "optkit_loud", folder / "optkit_loud-1.0.dist-info"
    for each in (package, metadata):
        each.mkdir()
    for name, text in {"__init__": "", "stage": STAGE, "setting": SETTING, "eval": EVAL}.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: optkit-loud\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(POINTS, encoding="utf-8")
    return folder


@pytest.fixture
def optkit(site: Path, tmp_path: Path) -> Optkit:
    """Return the command line in a fresh process that finds the package."""
    variables = {"PYTHONPATH": f"{site}{os.pathsep}{environment()['PYTHONPATH']}", "OPTKIT_STORE": str(tmp_path / "s")}

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return python("-c", "from optkit_cli.start import start; start()", *words, cwd=tmp_path, **variables)

    return call


def test_they_are_listed_with_their_summaries(optkit: Optkit) -> None:
    for group, summaries in {
        "stages": ("Multiply the output layer by a factor.", "Keep logits within a limit."),
        "evals": ("How far from zero a logit gets.",),
    }.items():
        listed = optkit("list", group)
        assert listed.returncode == 0, listed.stderr
        assert all(summary in listed.stdout for summary in summaries)


def test_a_mistake_in_their_fields_is_refused_at_its_line(optkit: Optkit, tmp_path: Path) -> None:
    (tmp_path / "loud.yaml").write_text(RECIPE.format(model="smollm2-135m").replace("limit", "limits"))
    refused = optkit("validate", "loud.yaml")
    assert refused.returncode == 2
    assert "loud.yaml:6:" in refused.stderr
    assert "limits" in refused.stderr


@pytest.mark.usefixtures("warm_children")
def test_a_recipe_of_them_runs(optkit: Optkit, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    source = tiny_model("qwen2")
    (tmp_path / "loud.yaml").write_text(RECIPE.format(model=source), encoding="utf-8")
    run = optkit("run", "loud.yaml", "--device", "cpu", "--json")
    assert run.returncode == 0, run.stderr
    before, after = (load_file(place / "model.safetensors") for place in (source, tmp_path / "artifacts" / "loud"))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert after[name].equal(weight * 3 if name == "lm_head.weight" else weight)

    card = json.loads(run.stdout)
    (row,) = card["rows"]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(source)(torch.arange(12)[None]).logits
    assert row["baseline"]["value"] == pytest.approx(float(logits.abs().max()), rel=1e-5)
    assert row["metric"]["value"] == 0.25
    shown = optkit("show", "artifacts/loud", "--verbose")
    assert "capped_logits: {'limit': 0.25}" in shown.stdout
    assert "louder_head" in shown.stdout
    assert optkit("plan", "loud.yaml", "--device", "cpu", "--json").returncode == 0
