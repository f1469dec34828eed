"""config.json of a model with fewer blocks, and which may go."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from transformers import Llama4TextConfig

from optkit.errors import SourceError, StageError
from optkit.model.depth import losable, shallower_config
from optkit.model.width import Widths, narrower_config


def test_kinds_of_blocks_of_hybrids_are_those_of_the_blocks_that_are_left() -> None:
    def left(kept: list[int], **config: Any) -> dict[str, Any]:
        return {key: value for key, value in shallower_config(config, kept).items() if key != "num_hidden_layers"}

    jamba = {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1}
    assert left([1, 2, 3, 4, 5], **jamba) == {"attn_layer_period": 3, "attn_layer_offset": 0}
    with pytest.raises(
        StageError,
        match=r"prune_structured.remove_layers: config.json says by attn_layer_period: 3 .*not evenly spaced"
        r".*The 4 blocks.*Remove 3 neighbouring blocks",
    ):
        left([0, 1, 4, 5], **jamba)
    bamba = {"num_hidden_layers": 2, "attn_layer_indices": [1, 3], "time_step_limit": [0.0, 1.0]}
    assert left([1], **bamba) == {"attn_layer_indices": [0], "time_step_limit": [0.0, 1.0]}
    assert left([1, 3], hybrid_override_pattern="M-M*") == {"hybrid_override_pattern": "-*"}
    kinds = {"num_hidden_layers": 4, "block_types": ["recurrent", "recurrent", "attention"]}
    assert left([0, 2, 3], **kinds) == {"block_types": ["recurrent", "attention", "recurrent"]}


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        {"num_hidden_layers": 2, "layer_types": ["linear_attention", "sliding_attention"]},
        {"hybrid_override_pattern": "M*"},
        {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
        {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    ],
)
def test_the_only_block_with_attention_stays(config: dict[str, Any]) -> None:
    assert shallower_config(config, [1])
    with pytest.raises(
        StageError,
        match=r"^prune_structured.remove_layers: no block with attention would be left. transformers counts .* "
        r"Remove fewer blocks, or name others",
    ):
        shallower_config(config, [0])


def test_blocks_that_may_not_go_are_passed_over() -> None:
    def refuse(gone: Sequence[int]) -> None:
        if {2, 3} <= {*gone} or 5 in gone:
            raise StageError(f"{sorted(gone)}")

    assert losable([5, 2, 3, 0], 2, refuse) == [2, 0]
    assert losable([2, 0], 1, refuse, gone=[3]) == [0]
    with pytest.raises(StageError, match=r"^\[5\]\.$"):
        losable([5, 2, 3], 2, refuse)


def test_nested_config_and_lists_that_are_no_blocks() -> None:
    text = {
        "num_hidden_layers": 3,
        "layer_types": ["a", "b", "c"],
        "eos_token_id": [1, 2, 3],
        "mlp_only_layers": [0, 2],
    }
    made = shallower_config({"text_config": text, "num_hidden_layers": 9}, [0, 2])
    left = {"num_hidden_layers": 2, "layer_types": ["a", "c"], "eos_token_id": [1, 2, 3], "mlp_only_layers": [0, 1]}
    assert made == {"text_config": left, "num_hidden_layers": 9}


def test_sizes_that_a_nested_config_leaves_to_transformers_are_changed_too() -> None:
    nested = {"model_type": "llama4_text", "layer_types": ["full_attention", "chunked_attention"] * 24}
    found, assumed = {"model_type": "llama4", "text_config": nested}, Llama4TextConfig()
    assert len(nested["layer_types"]) == assumed.num_hidden_layers == 48
    left = Llama4TextConfig(**shallower_config(found, range(1, 48))["text_config"])
    assert left.num_hidden_layers == 47
    assert left.layer_types == [*nested["layer_types"][1:]]
    before = Widths(hidden=assumed.hidden_size, ffn=8192, heads=40, key_heads=8, head_size=128)
    narrow = narrower_config(found, before, replace(before, hidden=2560, heads=20, key_heads=4))
    left = Llama4TextConfig(**narrow["text_config"])
    sizes = left.hidden_size, left.num_attention_heads, left.num_key_value_heads, left.head_dim
    assert sizes == (2560, 20, 4, assumed.head_dim)


def test_no_count_of_blocks() -> None:
    with pytest.raises(SourceError, match="llama: config.json does not say how many decoder blocks the model has"):
        shallower_config({"model_type": "llama"}, [0])


def test_a_scale_by_the_number_of_blocks_is_kept() -> None:
    config = {"num_hidden_layers": 4, "scale_depth": 1.4}
    assert shallower_config(config, [0]) == {
        "num_hidden_layers": 1,
        "scale_depth": 0.7,
    }  # 1.4 / sqrt(4) = 0.7 / sqrt(1)


def test_what_config_json_leaves_to_the_code_is_that_of_the_blocks_that_are_left() -> None:
    from transformers import JambaConfig, MiniCPM3Config

    scaled = shallower_config({"num_hidden_layers": 4}, [0], MiniCPM3Config(num_hidden_layers=4).to_dict())
    assert scaled == {"num_hidden_layers": 1, "scale_depth": 0.7}  # the code's 1.4 / sqrt(4)
    unscaled = {"num_hidden_layers": 4, "scale_depth": None}  # the code takes sqrt(4), which scales nothing
    assert shallower_config(unscaled, [0], MiniCPM3Config(**unscaled).to_dict())["scale_depth"] is None
    resolved = JambaConfig(num_hidden_layers=8)
    left = JambaConfig(**shallower_config({"num_hidden_layers": 8}, range(1, 8), resolved.to_dict()))
    for name in ("layers_block_type", "layers_num_experts"):
        assert getattr(left, name) == getattr(resolved, name)[1:]
