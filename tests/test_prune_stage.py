"""Stage `prune` on tiny models: what is zero afterwards, what calibration buys, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from optkit.algorithms.pruning import follows
from optkit.algorithms.sparsity_pattern import Pattern
from optkit.model.checkpoint import Checkpoint
from optkit.model.skeleton import Skeleton
from optkit.progress import SilentProgress
from optkit.source.calibration import Calibration
from optkit.stage import Context, Report
from optkit.stages.prune import Prune
from optkit.stages.selection import layers_of

TinyModel = Callable[[str], Path]


class Warnings(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def warn(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def text(tmp_path: Path) -> Calibration:
    """Return a calibration text of random letters that comes from a file."""
    letters = torch.randint(97, 123, (20_000,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "letters.txt").write_text("".join(map(chr, letters)), encoding="utf-8")
    return Calibration(dataset=str(tmp_path / "letters.txt"), samples=16, sequence_length=64)


def prune(source: Path, target: Path, context: Context | None = None, **fields: Any) -> Report:
    target.mkdir()
    return Prune(**fields).run(source, target, context or Context())


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the layers of the blocks, float [out, in], routers left out."""
    checkpoint = Checkpoint(directory)
    layers = {name: layer for name, layer in layers_of(checkpoint.shape).items() if not name.endswith(".gate")}
    return {
        name: checkpoint.read(f"{name}.weight").T if layer.transposed else checkpoint.read(f"{name}.weight")
        for name, layer in layers.items()
    }


def outputs(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    skeleton = Skeleton(Checkpoint(directory))
    skeleton.load_("", "cpu")
    with torch.no_grad():
        return skeleton.model(tokens).logits


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "gpt2", "mixtral"])
@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_each_method_is_better_than_the_one_before(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, kind: str, pattern: str
) -> None:
    source = tiny_model(kind)
    tokens = text.tokens(source, None)[:4]
    original = outputs(source, tokens)
    errors = []
    for method, fields in {"magnitude": {}, "wanda": {"calibration": text}, "sparsegpt": {"calibration": text}}.items():
        target = tmp_path / method
        report = prune(source, target, method=method, pattern=pattern, **fields)
        pruned = weights(target)
        zeros = sum(int((weight == 0).sum()) for weight in pruned.values()) / sum(weight.numel() for weight in pruned.values())
        assert report.details["sparsity"] == pytest.approx(zeros)
        assert zeros == pytest.approx(0.5, abs=0.001)
        assert report.changed == len(pruned)
        if pattern == "2:4":
            assert all(follows(weight, Pattern(2, 4)) for weight in pruned.values())
        errors.append((outputs(target, tokens) - original).square().mean().item())
    assert errors[2] < errors[1] < 1.05 * errors[0]


def test_what_is_no_weight_of_a_layer_stays(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("mixtral")
    report = prune(source, tmp_path / "pruned", method="magnitude", exclude=("*.q_proj",))
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "pruned" / "model.safetensors")
    changed = {name.removesuffix(".weight") for name in before if not torch.equal(before[name], after[name])}
    assert set(before) == set(after)
    assert len(changed) == report.changed
    assert all(".experts." in name or "self_attn" in name for name in changed)
    assert report.skipped["model.layers.0.self_attn.q_proj"] == "excluded"
    assert report.skipped["model.layers.0.block_sparse_moe.gate"] == "router"
    assert report.skipped["lm_head"] == "outside the decoder blocks"
    assert report.calibrated_on == ()
