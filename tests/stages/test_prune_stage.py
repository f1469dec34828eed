"""Stage `prune` on tiny models: what is zero afterwards, what calibration buys, and what it
refuses.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from optkit.algorithms.pruning import follows
from optkit.algorithms.sparsity_pattern import Pattern
from optkit.model.checkpoint import Checkpoint
from optkit.model.linear_layers import Layer, layers_of
from optkit.source.calibration import Calibration
from optkit.stage import Context
from optkit.stages.awq import Awq
from optkit.stages.gptq import Gptq
from optkit.stages.prune import Prune
from optkit.stages.pruning.allocation import by_outliers, outlier_share
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel, Warnings
from tests.stages.test_gptq_stage import outputs
from tests.stages.test_gptq_stage import weights as unpacked
from tests.support.changes import changed_copy
from tests.support.crossed import crossed
from tests.support.pruning import prune
from tests.support.running import run_stage


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the layers of the blocks, float [out, in], routers left out."""
    checkpoint = Checkpoint(directory)
    layers = {name: layer for name, layer in layers_of(checkpoint.shape).items() if not name.endswith(".gate")}
    return {
        name: checkpoint.read(f"{name}.weight").T if layer.transposed else checkpoint.read(f"{name}.weight")
        for name, layer in layers.items()
    }


@pytest.mark.parametrize(
    ("kind", "pattern"), crossed(["llama", "qwen2", "gemma", "gpt2", "mixtral"], ["unstructured", "2:4"])
)
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
        zeros = sum(int((weight == 0).sum()) for weight in pruned.values()) / sum(
            weight.numel() for weight in pruned.values()
        )
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
    report = run_stage(QUANTIZERS[name](text), tmp_path / "pruned", tmp_path / "packed")
    quantized = unpacked(tmp_path / "packed")
    assert set(quantized) == set(weights(tmp_path / "pruned"))
    filled = name == "gptq, filling"
    assert all(follows(weight, Pattern(2, 4)) for weight in quantized.values()) is not filled
    if name.startswith("gptq"):
        zeros = sum(int((weight == 0).sum()) for weight in quantized.values()) / sum(
            weight.numel() for weight in quantized.values()
        )
        assert report.details["zeros"] == {"layers": 21, "before": 0.5, "after": pytest.approx(zeros)}
        said = "which GPTQ fills: keep_zeros: true would keep them" if filled else "and stay so"
        assert report.notes[-1] == f"50.0% of the weights of 21 pruned layers were 0, {said}; {zeros:.1%} are now"


def test_gptq_takes_few_zeros_for_chance(tiny_model: TinyModel, tmp_path: Path, text: Calibration) -> None:
    prune(tiny_model("llama"), tmp_path / "pruned", sparsity=0.1, method="magnitude")
    for keep in ("auto", False):
        report = run_stage(Gptq(calibration=text, keep_zeros=keep), tmp_path / "pruned", tmp_path / str(keep))
        assert "zeros" not in report.details
    auto, never = unpacked(tmp_path / "auto"), unpacked(tmp_path / "False")
    assert all(torch.equal(auto[name], never[name]) for name in auto)


@pytest.mark.parametrize(("allocation", "kind"), crossed(["owl", "sensitivity"], ["llama", "gpt2"]))
def test_an_allocation_keeps_the_sum_and_its_bounds(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, allocation: str, kind: str
) -> None:
    fields: dict[str, Any] = {"allocation": allocation, "allocation_spread": 0.2, "sparsity": 0.6, "calibration": text}
    report = prune(tiny_model(kind), tmp_path / "pruned", method="wanda", **fields)
    chosen = report.details["sparsities"]
    assert report.details["sparsity"] == pytest.approx(0.6, abs=0.005)
    assert min(chosen.values()) >= 0.4 - 1e-6
    assert max(chosen.values()) <= 0.8 + 1e-6
    assert len(set(chosen.values())) > 1
    for name, weight in weights(tmp_path / "pruned").items():
        assert (weight == 0).float().mean().item() == pytest.approx(chosen[name], abs=0.01)


def test_outliers_are_counted_as_in_the_paper() -> None:
    scores = [torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 41]]), torch.tensor([[1.0, 1]])]
    assert outlier_share(scores, 5) == 0.1
    assert outlier_share(scores, 8.3) == 0
    layers = {name: Layer(name, 10, size, transposed=False) for name, size in (("a", 10), ("b", 10), ("c", 20))}
    chosen = by_outliers({"a": 0.02, "b": 0.04, "c": 0.03}, layers, 0.5, 0.08)
    assert chosen == pytest.approx({"a": 0.58, "b": 0.42, "c": 0.5})
    assert by_outliers(dict.fromkeys(layers, 0.1), layers, 0.5, 0.08) == dict.fromkeys(layers, 0.5)


def test_experts_that_few_tokens_reach_are_pruned_by_magnitude(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration
) -> None:
    few = text.model_copy(update={"samples": 2, "sequence_length": 60})
    for method in ("wanda", "sparsegpt"):
        told = Warnings()
        report = prune(
            tiny_model("mixtral"),
            tmp_path / method,
            Context(progress=told),
            method=method,
            calibration=few,
            pattern="2:4",
        )
        by_magnitude = report.details["pruned_by_magnitude"]
        assert all(tokens < 128 for tokens in by_magnitude.values())
        assert len(by_magnitude) == report.changed
        name, tokens = next(iter(by_magnitude.items()))
        assert told.lines == [
            f"{report.changed} layers are pruned by magnitude: they saw fewer than the 128 calibration "
            f"tokens that {method} needs ({name}: {tokens}); raise prune.calibration.samples"
        ]
        assert report.notes[-1] == told.lines[0]
    prune(tiny_model("mixtral"), tmp_path / "magnitude", method="magnitude", pattern="2:4")
    expected = load_file(tmp_path / "magnitude" / "model.safetensors")
    for method in ("wanda", "sparsegpt"):
        found = load_file(tmp_path / method / "model.safetensors")
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_is_left_out_is_filled_in_where_it_is_read() -> None:
    stage = Prune(method="wanda", pattern="2:4")
    assert (stage.sparsity, stage.damping, stage.allocation_spread) == (0.5, None, None)
    assert stage.calibration == Calibration(dataset="c4")
    assert Prune.model_validate_json(stage.model_dump_json()) == stage
    assert (Prune().damping, Prune().refinements, Prune().equal_tokens) == (0.01, 10, True)
    assert Prune(method="magnitude").calibration is None


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "magnitude"},
        {"method": "wanda"},
        {},
        {"allocation": "sensitivity"},
        {"pattern": "4:8", "exclude": ("*.1.*",)},
    ],
)
def test_the_plan_knows_what_is_left(
    tiny_model: TinyModel, tmp_path: Path, text: Calibration, fields: dict[str, Any]
) -> None:
    stage = Prune(**({} if fields.get("method") == "magnitude" else {"calibration": text}), **fields)
    source = Checkpoint(tiny_model("qwen2"))
    cost, left = stage.predict(source.shape, "cpu")
    stage.run(source.directory, tmp_path, Context())
    assert dict(left.tensors) == Checkpoint(tmp_path).tensors
    assert left.config == Checkpoint(tmp_path).config
    assert cost.ram_bytes > cost.disk_bytes == source.shape.size_bytes
    assert stage.predict(source.shape, "cuda")[0].gpu_bytes > 0


def test_notes_say_who_profits(tiny_model: TinyModel, tmp_path: Path) -> None:
    notes = {
        pattern: prune(
            tiny_model("llama"), tmp_path / pattern.replace(":", "of"), method="magnitude", pattern=pattern
        ).notes[0]
        for pattern in ("unstructured", "2:4", "4:8")
    }
    assert notes["unstructured"].startswith(
        "50.0% of the weights of 21 layers are 0, in no pattern: no engine that optkit measures"
    )
    assert notes["2:4"].startswith("21 layers are 2:4 sparse, which no engine that optkit exports to uses by itself")
    assert "torch.sparse.to_sparse_semi_structured" in notes["2:4"]
    assert notes["4:8"].startswith("21 layers are 4:8 sparse, and no engine that optkit measures has a kernel for it")


def test_bfloat16_keeps_its_dtype_and_every_zero(tiny_model: TinyModel, tmp_path: Path, text: Calibration) -> None:
    source = changed_copy(
        tiny_model("llama"),
        tmp_path,
        lambda tensors: {name: each.bfloat16() for name, each in tensors.items()},
        dtype="bfloat16",
    )
    report = prune(source, tmp_path / "pruned", calibration=text, pattern="2:4")
    assert report.details["sparsity"] == 0.5
    assert {info.dtype for info in Checkpoint(tmp_path / "pruned").tensors.values()} == {"BF16"}
