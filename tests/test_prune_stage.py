"""Stage `prune` on tiny models: what is zero afterwards, what calibration buys, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from optkit.algorithms.packing import unpack_compressed_tensors
from optkit.algorithms.pruning import follows
from optkit.algorithms.sparsity_pattern import Pattern
from optkit.model.checkpoint import Checkpoint
from optkit.model.skeleton import Skeleton
from optkit.progress import SilentProgress
from optkit.source.calibration import Calibration
from optkit.stage import Context, Report
from optkit.stages.awq import Awq
from optkit.stages.gptq import Gptq
from optkit.stages.prune import Prune
from optkit.stages.rtn import Rtn
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
    return Calibration(dataset=str(tmp_path / "letters.txt"), samples=8, sequence_length=64)


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


def packed_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the weights that packed ones stand for, by layer."""
    checkpoint = Checkpoint(directory)
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name in checkpoint.tensors:
        module, _, leaf = name.rpartition(".")
        layers.setdefault(module, {})[leaf] = checkpoint.read(name)
    return {name: unpack_compressed_tensors(parts, 4).dequantize().float() for name, parts in layers.items() if "weight_packed" in parts}


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


QUANTIZERS: dict[str, Callable[[Calibration], Gptq | Awq | Rtn]] = {
    "gptq": lambda text: Gptq(calibration=text),
    "gptq, asymmetric": lambda text: Gptq(calibration=text, keep_zeros=True, symmetric=False),
    "gptq, filling": lambda text: Gptq(calibration=text, keep_zeros=False),
    "awq": lambda text: Awq(calibration=text),
    "rtn": lambda text: Rtn(),
    "rtn, asymmetric": lambda text: Rtn(symmetric=False),
}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_zeros_outlive_quantizers_but_where_gptq_is_told_to_fill_them(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, name: str
) -> None:
    prune(tiny_model("llama"), tmp_path / "pruned", pattern="2:4", method="magnitude")
    (tmp_path / "packed").mkdir()
    report = QUANTIZERS[name](text).run(tmp_path / "pruned", tmp_path / "packed", Context())
    quantized = packed_weights(tmp_path / "packed")
    assert set(quantized) == set(weights(tmp_path / "pruned"))
    filled = name == "gptq, filling"
    assert all(follows(weight, Pattern(2, 4)) for weight in quantized.values()) is not filled
    if name.startswith("gptq"):
        zeros = sum(int((weight == 0).sum()) for weight in quantized.values()) / sum(weight.numel() for weight in quantized.values())
        assert report.details["zeros"] == {"layers": 21, "before": 0.5, "after": pytest.approx(zeros)}
        said = "which GPTQ fills: keep_zeros: true would keep them" if filled else "and stay so"
        assert report.notes[-1] == f"gptq: 50.0% of the weights of 21 pruned layers were 0, {said}; {zeros:.1%} are now"


def test_gptq_takes_few_zeros_for_chance(tiny_model: TinyModel, tmp_path: Path, text: Calibration) -> None:
    prune(tiny_model("llama"), tmp_path / "pruned", sparsity=0.1, method="magnitude")
    for keep in ("auto", False):
        (tmp_path / str(keep)).mkdir()
        report = Gptq(calibration=text, keep_zeros=keep).run(tmp_path / "pruned", tmp_path / str(keep), Context())
        assert "zeros" not in report.details
    auto, never = packed_weights(tmp_path / "auto"), packed_weights(tmp_path / "False")
    assert all(torch.equal(auto[name], never[name]) for name in auto)
