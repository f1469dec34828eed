"""Widths that `prune_structured` refuses: what cannot be, what nobody knows, and fields without sense."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from optkit.errors import StageError
from optkit.recipe.field_faults import validate
from optkit.stages.prune_structured import PruneStructured
from tests.support.narrowed import SMALL, changed
from tests.support.smaller_models import letters, made_model, pruned, refused
from tests.zoo.models import save_model


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
        (
            "llama",
            {"attention_heads": 8},
            "prune_structured.attention_heads: 8 heads are more than the model's 4. Take fewer.",
        ),
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


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "deepseek_v3",
            "no tensor of deepseek_v3 is as long as its 4 heads of 8 channels. Its attention is of another",
        ),
        (
            "gemma4_text",
            "self_attn.k_norm.weight: one norm stands over all heads together. It has 512 channels, a head",
        ),
    ],
)
def test_heads_that_are_not_those_of_the_config(kind: str, message: str, tmp_path: Path) -> None:
    assert message in refused(save_model(kind, tmp_path / "source"), kv_heads=1)


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
            {"kv_heads": 1, "layer_search": "one_by_one"},
            "layer_importance and layer_search choose blocks to remove: set remove_layers too",
        ),
    ],
)
def test_fields_that_make_no_sense(fields: dict[str, Any], message: str) -> None:
    faults = validate(PruneStructured, fields)
    assert isinstance(faults, list)
    assert faults[0].message == message
