"""Stage `prune_structured` with narrower parts: what has no effect goes without a trace, what
matters stays, what cannot be is refused.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from optkit.algorithms.importance import channel_energy, compensated, head_energy
from optkit.errors import StageError
from optkit.model.checkpoint import Checkpoint
from optkit.model.width import Widths
from optkit.recipe.field_faults import validate
from optkit.stages.narrowing.choice import left_heads
from optkit.stages.prune_structured import PruneStructured
from tests.support.near import near
from tests.support.smaller_models import config_of, letters, logits, made_model, model_of, pruned, refused

Change = Callable[[str, Tensor], Tensor]
REMOVED = torch.tensor([1, 4, 7, 8, 20, 21, 22, 47] * 2).unique()
"""Channels whose effect is nothing in the models of the tests: 8 of 48 inside of the feed-forward
layers, 8 of 32 of the hidden states.
"""
HIDDEN = torch.tensor([0, 3, 5, 6, 17, 18, 30, 31])
SMALL = {"num_hidden_layers": 2}


def changed(source: Path, target: Path, change: Change) -> Path:
    """Return a copy of a model with other tensors."""
    directory = Path(shutil.copytree(source, target))
    tensors = {
        name: change(name, tensor.clone()) for name, tensor in load_file(directory / "model.safetensors").items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


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


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "llama",
            {"intermediate_size": 40},
            "prune_structured.intermediate_size: 40 is not a multiple of 64. Take 64, or set multiple_of.",
        ),
        (
            "llama",
            {"intermediate_size": 20, "multiple_of": 8},
            "20 is not a multiple of 8. Take 16 or 24, or set multiple_of.",
        ),
        (
            "llama",
            {"intermediate_size": 48, "multiple_of": 8},
            "it is 48, and the model has 48. Take less, or lower multiple_of.",
        ),
        (
            "llama",
            {"hidden_size": 0.9},
            "0.9 of 32 channels, rounded to a multiple of 64, is 64, and the model has 32. Take less, or lower",
        ),
        ("llama", {"attention_heads": 8}, "prune_structured.attention_heads: 8 heads are more than the model's 4."),
        ("llama", {"kv_heads": 4}, "prune_structured.kv_heads: 4 heads are more than the model's 2."),
        ("llama", {"attention_heads": 4}, "prune_structured: the model has 4 heads and 2 of keys and values already."),
        (
            "llama",
            {"attention_heads": 3},
            "3 heads of queries cannot share 2 heads of keys and values equally. The model has 4 and 2. Take a mul",
        ),
        (
            "llama",
            {"attention_heads": 4, "kv_heads": 1, "kv_method": "importance"},
            "4 heads of queries cannot share 1 heads of keys",
        ),
        (
            "multi_head",
            {"kv_heads": 3},
            "4 heads cannot be pooled to 3. Every head that is left is the mean of equally many. Take one of 1, 2, or",
        ),
        (
            "multi_head",
            {"attention_heads": 3},
            "prune_structured.attention_heads: a hidden size of 32 is no multiple of 3 heads. transformers",
        ),
        (
            "gpt2",
            {"attention_heads": 2},
            "prune_structured.attention_heads: the config.json of gpt2 has no place for heads of another size or",
        ),
        (
            "gpt2",
            {"kv_heads": 1},
            "prune_structured.kv_heads: the config.json of gpt2 has no place for heads of another size or number.",
        ),
        (
            "opt",
            {"hidden_size": 16, "multiple_of": 8},
            "prune_structured.hidden_size: the config.json of opt has no place for heads",
        ),
        (
            "gemma",
            {"hidden_size": 16, "multiple_of": 8},
            "gemma multiplies its embeddings by the root of the hidden size.",
        ),
        (
            "mixtral",
            {"intermediate_size": 16, "multiple_of": 8},
            "the feed-forward layers are not one of equal size in every block. Experts,",
        ),
        (
            "qwen2_moe",
            {"intermediate_size": 16, "multiple_of": 8},
            "the feed-forward layers are not one of equal size in every block.",
        ),
        (
            "helium",
            {"attention_heads": 2},
            "prune_structured.attention_heads: 2 heads of 8 channels are not the 32 channels of the hidden "
            "states. The attention of helium "
            "ends in a layer of hidden size x hidden size, whatever heads there are. Take remove_layers, "
            "intermediate_size and kv_heads.",
        ),
        (
            "helium",
            {"hidden_size": 16, "multiple_of": 8},
            "prune_structured.hidden_size: 4 heads of 8 channels are not the 16 channels of the hidden states.",
        ),
        (
            "olmo2",
            {"attention_heads": 2},
            "layers.0.self_attn.k_norm.weight: one norm stands over all heads together. It has 16 channels, a head",
        ),
        (
            "mixtral",
            {"hidden_size": 16, "multiple_of": 8},
            "optkit does not know how to narrow this tensor of mixtral, [48, 32]. Everything that",
        ),
    ],
)
def test_plans_refuse_widths_that_cannot_be(kind: str, fields: dict[str, Any], message: str) -> None:
    assert message in refused(
        made_model(kind, **({"n_layer": 2} if kind == "gpt2" else {} if kind == "qwen2_moe" else SMALL)), **fields
    )


def test_a_tensor_that_nobody_knows_beside_those_that_change(tmp_path: Path) -> None:
    source = changed(made_model("llama", **SMALL), tmp_path / "source", lambda _, tensor: tensor)
    name = "model.layers.0.self_attn.sinks"
    save_file(load_file(source / "model.safetensors") | {name: torch.ones(4)}, source / "model.safetensors")
    message = (
        f"prune_structured: {name}: optkit does not know how to narrow this tensor of llama, [4]. "
        "It stands beside the layers"
    )
    assert message in refused(source, attention_heads=2)


def test_a_norm_that_subtracts_the_mean(tmp_path: Path) -> None:
    source = changed(made_model("llama", **SMALL), tmp_path / "source", lambda _, tensor: tensor)
    save_file(
        load_file(source / "model.safetensors") | {"model.norm.bias": torch.ones(32)}, source / "model.safetensors"
    )
    found = refused(source, hidden_size=16, multiple_of=8)
    assert found.startswith(
        "prune_structured.hidden_size: model.norm.bias: a norm with a bias subtracts the mean of all channels."
    )


def test_weights_that_no_longer_fit_their_dtype(tmp_path: Path) -> None:
    def change(name: str, tensor: Tensor) -> Tensor:
        return (torch.full_like(tensor, 6e4) if name == "model.norm.weight" else tensor).half()

    source = changed(made_model("llama", **SMALL), tmp_path / "source", change)
    message = (
        "prune_structured: model.norm.weight: weights of up to 84,853 do not fit float16. They make up for "
        "what was removed. Set compensate"
    )
    with pytest.raises(StageError, match=message):
        pruned(source, tmp_path / "target", hidden_size=16, multiple_of=8, calibration=letters(tmp_path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"intermediate_size": 1.5},
            "intermediate_size: 1.5 is no fraction between 0 and 1. Write a whole number to say how many",
        ),
        ({"hidden_size": 0}, "hidden_size: 0 is less than 1"),
        ({"kv_heads": 0}, "kv_heads: 0 is not at least 1."),
        ({"kv_method": "pooling", "attention_heads": 2}, "kv_method says how kv_heads are made: set kv_heads too"),
        (
            {"kv_heads": 1, "layer_search": "at_once"},
            "layer_importance and layer_search choose blocks to remove: set remove_layers too",
        ),
    ],
)
def test_fields_that_make_no_sense(fields: dict[str, Any], message: str) -> None:
    faults = validate(PruneStructured, fields)
    assert isinstance(faults, list)
    assert faults[0].message == message
