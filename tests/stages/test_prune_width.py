"""Stage `prune_structured` with narrower parts: what has no effect goes without a trace, what
matters stays, what cannot be is refused.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from optkit.algorithms.importance import channel_energy, compensated, head_energy
from optkit.model.checkpoint import Checkpoint
from optkit.model.width import Widths
from optkit.stage import Context
from optkit.stages.cast import Cast
from optkit.stages.narrowing.choice import left_heads
from tests.support.narrowed import SMALL, changed
from tests.support.near import near
from tests.support.smaller_models import config_of, letters, logits, made_model, model_of, pruned
from tests.zoo.models import save_model

REMOVED = torch.tensor([1, 4, 7, 8, 20, 21, 22, 47] * 2).unique()
"""Channels whose effect is nothing in the models of the tests: 8 of 48 inside of the feed-forward
layers, 8 of 32 of the hidden states.
"""
HIDDEN = torch.tensor([0, 3, 5, 6, 17, 18, 30, 31])


def assert_same(source: Path, target: Path) -> None:
    want = logits(model_of(source))
    assert torch.allclose(logits(model_of(target)), want, atol=2e-5 * float(want.abs().max()))


@pytest.mark.parametrize(
    ("kind", "compensate"),
    [("llama_biases", True), ("gemma3", True), ("phi3", True), ("gpt2", True), ("opt", True), ("opt", False)],
)
def test_feed_forward_channels_without_effect(kind: str, compensate: bool, tmp_path: Path) -> None:
    def change(name: str, tensor: Tensor) -> Tensor:
        if name.endswith(("down_proj.weight", "fc2.weight")):
            tensor[:, REMOVED] = 0
        if name.endswith("mlp.c_proj.weight"):
            tensor[REMOVED] = 0
        return tensor

    sizes = {"n_layer": 2, "n_inner": 48} if kind == "gpt2" else SMALL
    source = changed(made_model(kind, **sizes), tmp_path / "source", change)
    fields = {"intermediate_size": 40, "multiple_of": 8, "compensate": compensate, "calibration": letters(tmp_path)}
    report = pruned(source, tmp_path / "target", **fields)
    assert_same(source, tmp_path / "target")
    assert report.changed == 2
    assert report.details["widths_after"]["ffn"] == 40
    key = {"gpt2": "n_inner", "opt": "ffn_dim"}.get(kind, "intermediate_size")
    assert config_of(tmp_path / "target")[key] == 40


@pytest.mark.parametrize(("kind", "key"), [("starcoder2", "intermediate_size"), ("gpt_neo", "intermediate_size")])
def test_projections_named_like_those_of_gpt2_are_no_conv1d(kind: str, key: str, tmp_path: Path) -> None:
    source = save_model(kind, tmp_path / "source")
    pruned(source, tmp_path / "target", intermediate_size=64, calibration=letters(tmp_path))
    assert config_of(tmp_path / "target")[key] == 64
    assert torch.isfinite(logits(model_of(tmp_path / "target"))).all()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma", "phi3", "mixtral"])
def test_heads_of_queries_without_effect(kind: str, tmp_path: Path) -> None:
    size = 16 if kind in ("qwen3", "gemma") else 8

    def change(name: str, tensor: Tensor) -> Tensor:
        if name.endswith("o_proj.weight"):
            tensor.unflatten(1, (4, size))[:, [0, 3]] = 0
        return tensor

    source = changed(made_model(kind, **SMALL), tmp_path / "source", change)
    report = pruned(source, tmp_path / "target", attention_heads=2, calibration=letters(tmp_path))
    assert_same(source, tmp_path / "target")
    assert report.details["heads"] == [(1, 2)] * 2
    config = config_of(tmp_path / "target")
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (2, 2, size)


def test_multi_head_attention_loses_keys_with_queries(tmp_path: Path) -> None:
    def change(name: str, tensor: Tensor) -> Tensor:
        if name.endswith("o_proj.weight"):
            tensor.unflatten(1, (4, 8))[:, [1, 2]] = 0
        return tensor

    source = changed(made_model("multi_head", **SMALL), tmp_path / "source", change)
    report = pruned(source, tmp_path / "target", attention_heads=2, calibration=letters(tmp_path))
    assert_same(source, tmp_path / "target")
    assert report.details["kv_heads"] == [((0,), (3,))] * 2
    assert (
        report.details["before"]["kv_cache_bytes_per_token"] == 2 * report.details["after"]["kv_cache_bytes_per_token"]
    )


@pytest.mark.parametrize("kind", ["multi_head", "llama_biases", "qwen3", "phi3", "helium"])
def test_equal_heads_of_keys_and_values_are_pooled_exactly(kind: str, tmp_path: Path) -> None:
    heads, left = (4, 2) if kind == "multi_head" else (2, 1)
    size = 16 if kind in ("qwen3", "gemma") else 8

    def change(name: str, tensor: Tensor) -> Tensor:
        if ".k_proj." in name or ".v_proj." in name:
            grouped = tensor.unflatten(0, (left, heads // left, size))
            grouped.copy_(grouped[:, :1].clone().expand_as(grouped))
        if ".qkv_proj." in name:
            grouped = tensor[4 * size :].unflatten(0, (2, left, heads // left, size))
            grouped.copy_(grouped[:, :, :1].clone().expand_as(grouped))
        return tensor

    source = changed(made_model(kind, **SMALL), tmp_path / "source", change)
    report = pruned(source, tmp_path / "target", kv_heads=left)
    assert_same(source, tmp_path / "target")
    assert report.calibrated_on == ()
    assert config_of(tmp_path / "target")["num_key_value_heads"] == left


def test_pooled_heads_are_the_mean_of_their_neighbours(tmp_path: Path) -> None:
    source = made_model("multi_head", **SMALL)
    pruned(source, tmp_path / "target", kv_heads=2)
    before, after = (load_file(each / "model.safetensors") for each in (source, tmp_path / "target"))
    name = "model.layers.1.self_attn.v_proj.weight"
    assert torch.allclose(
        after[name],
        torch.cat([(before[name][:8] + before[name][8:16]) / 2, (before[name][16:24] + before[name][24:]) / 2]),
    )


def test_heads_of_keys_and_values_without_effect_go_by_importance(tmp_path: Path) -> None:
    def change(name: str, tensor: Tensor) -> Tensor:
        if name.endswith("o_proj.weight"):
            tensor[:, :16] = 0
        return tensor

    source = changed(made_model("llama_biases", **SMALL), tmp_path / "source", change)
    report = pruned(source, tmp_path / "target", kv_heads=1, kv_method="importance", calibration=letters(tmp_path))
    assert_same(source, tmp_path / "target")
    assert (report.details["heads"], report.details["kv_heads"]) == ([(2, 3)] * 2, [((1,),)] * 2)


@pytest.mark.parametrize("kind", ["llama", "llama_biases", "qwen3", "phi3"])
def test_channels_of_the_hidden_states_without_effect(kind: str, tmp_path: Path) -> None:
    def change(name: str, tensor: Tensor) -> Tensor:
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            tensor[:, HIDDEN] = 0
        if re.search(r"(o_proj|down_proj)\.(weight|bias)$", name):
            tensor[HIDDEN] = 0
        return tensor

    source = changed(made_model(kind, **SMALL), tmp_path / "source", change)
    report = pruned(source, tmp_path / "target", hidden_size=24, multiple_of=8, calibration=letters(tmp_path))
    assert_same(source, tmp_path / "target")
    assert report.details["hidden_channels"] == [channel for channel in range(32) if channel not in HIDDEN]
    config = config_of(tmp_path / "target")
    assert (config["hidden_size"], config["head_dim"]) == (24, 16 if kind == "qwen3" else 8)
    assert ("lm_head.weight" in Checkpoint(tmp_path / "target").tensors) == (kind != "llama")


def test_everything_at_once(tmp_path: Path) -> None:
    source = made_model("llama")
    fields = {
        "remove_layers": 2,
        "intermediate_size": 0.7,
        "attention_heads": 2,
        "kv_heads": 1,
        "hidden_size": 0.5,
        "multiple_of": 8,
    }
    report = pruned(source, tmp_path / "target", **fields, calibration=letters(tmp_path))
    after = {"hidden": 16, "ffn": 32, "heads": 2, "key_heads": 1, "head_size": 8}
    assert report.details["widths_after"] == after
    assert logits(model_of(tmp_path / "target")).isfinite().all()
    assert report.changed == 2 + 4


def test_least_squares_makes_up_for_what_went() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = (
        torch.randn(200, 6, generator=generator) @ torch.randn(6, 9, generator=generator)
        + torch.randn(200, 9, generator=generator) / 10
    )
    weight, kept, exact = torch.randn(5, 9, generator=generator), torch.tensor([0, 2, 3, 5, 8]), inputs.double()
    made = compensated(weight, (exact.T @ exact / 200).float(), kept, damping=0.0)
    best = torch.linalg.lstsq(exact[:, kept], exact @ weight.T.double()).solution.T
    assert near(made, best)


def test_energies_are_those_of_the_outputs() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, weight = torch.randn(50, 6, generator=generator), torch.randn(4, 6, generator=generator)
    matrix = inputs.T @ inputs / 50
    x, w = inputs.double(), weight.double()
    channels = [(x[:, [channel]] @ w[:, [channel]].T).square().sum() / 50 for channel in range(6)]
    heads = [(x[:, start : start + 2] @ w[:, start : start + 2].T).square().sum() / 50 for start in (0, 2, 4)]
    assert near(channel_energy(weight, matrix), torch.stack(channels))
    assert near(head_energy(weight, matrix, 2), torch.stack(heads))


@pytest.mark.parametrize(
    ("before", "after", "pooling", "heads", "pools"),
    [
        ((4, 4), (2, 2), True, (1, 3), ((1,), (3,))),  # each pool of two keeps one query, and is what that query read
        ((4, 4), (2, 2), False, (0, 3), ((0,), (3,))),
        ((4, 2), (2, 2), False, (0, 3), ((0,), (1,))),
        ((4, 2), (4, 1), True, (0, 1, 2, 3), ((0, 1),)),
        ((4, 2), (2, 1), True, (0, 3), ((0, 1),)),
        ((4, 2), (2, 1), False, (2, 3), ((1,),)),
        ((4, 2), (4, 2), True, None, None),
    ],
)
def test_which_heads_are_left(before: Any, after: Any, pooling: bool, heads: Any, pools: Any) -> None:
    energies = torch.tensor([3.0, 1.0, 2.0, 4.0])
    if pooling and before == (4, 4):
        energies = energies.flip(0)[[1, 0, 2, 3]]  # 2, 4, 1, 3
    old, new = (Widths(0, 0, queries, keys, 8) for queries, keys in (before, after))
    assert left_heads(energies, old, new, pooling) == (heads, pools)


def test_norms_that_are_rounded_anew_are_no_difference(tmp_path: Path) -> None:
    """Those of bfloat16 are off by 0.4%, which was taken for wrong surgery from some sizes on."""
    (source := tmp_path / "source").mkdir()
    Cast(dtype="bfloat16").run(made_model("llama", **SMALL), source, Context())
    fields = {"hidden_size": 24, "multiple_of": 8, "calibration": letters(tmp_path)}
    assert pruned(source, tmp_path / "target", **fields).details["largest_difference"] < 1e-5
