"""The language model's part of config.json, and what transformers assumes of it."""

import pytest
from transformers import AutoConfig

from optkit.model.attention import HEADS, KEY_HEADS
from optkit.model.shape import BLOCK_COUNTS, WIDTHS
from optkit.model.text_config import text_config

KINDS = ("llama", "mistral", "gemma3_text", "qwen2", "qwen2_5_vl_text", "llama4_text", "mllama_text_model")


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_nested_config_has_the_sizes_that_transformers_assumes(kind: str) -> None:
    reference = AutoConfig.for_model(kind)
    told = text_config({"text_config": {"model_type": kind, "hidden_size": 96}})
    assert told["hidden_size"] == 96
    for name in (*BLOCK_COUNTS, *WIDTHS, *HEADS, "vocab_size", "head_dim"):
        if name != "hidden_size" and name in told:
            assert told[name] == getattr(reference, name), name
    assert {"num_hidden_layers", "num_attention_heads", "vocab_size"} <= told.keys()
    assert told.get(KEY_HEADS[0], reference.num_attention_heads) == reference.num_key_value_heads


def test_a_config_of_an_unknown_kind_stays_as_it_is() -> None:
    nested = {"model_type": "../llama", "hidden_size": 96}
    assert text_config({"text_config": nested}) == nested
    assert text_config({"hidden_size": 1}) == {"hidden_size": 1}
