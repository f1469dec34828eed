"""`kv_cache: {window: N}`: what a token sees, against transformers' own sliding window and against
a mask written by hand.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM

from optkit.errors import StageError
from optkit.kernels.attention_window import kept_tokens, visible
from optkit.model.shape import ModelShape
from optkit.recipe.recipe import load_recipe
from optkit.session import open_session
from optkit.settings.attention import Attention
from optkit.settings.kv_cache import KvCache
from optkit.settings.speculative import Speculative
from tests.conftest import TinyModel
from tests.support.near import near
from tests.zoo.models import save_model

TOKENS = torch.randint(90, (2, 40), generator=torch.Generator().manual_seed(1))


def opened(directory: Path, *settings: Any) -> Any:
    return open_session(directory, settings)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_without_sinks_it_is_the_sliding_window_of_mistral(
    tiny_model: TinyModel, tmp_path: Path, implementation: str
) -> None:
    llama, mistral = tiny_model("llama"), tmp_path / "mistral"
    mistral.mkdir()
    for file in llama.iterdir():
        (mistral / file.name).write_bytes(file.read_bytes())
    config = json.loads((llama / "config.json").read_text()) | {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 9,
    }
    (mistral / "config.json").write_text(json.dumps(config))
    own = AutoModelForCausalLM.from_pretrained(mistral, attn_implementation="eager")
    session = opened(llama, Attention(implementation=implementation), KvCache(window=9, sinks=0))  # type: ignore[arg-type]
    with torch.no_grad():
        assert near(session.logits(TOKENS), own(TOKENS).logits)
    expected = own.generate(TOKENS, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)
    assert session.generate(TOKENS, 12).equal(expected)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("sinks", [0, 3])
def test_prompts_parts_and_steps_see_the_same(tiny_model: TinyModel, kind: str, sinks: int) -> None:
    session = opened(tiny_model(kind), KvCache(window=11, sinks=sinks))
    length = TOKENS.shape[1]
    order = torch.arange(length)
    distance = order[:, None] - order
    seen = (distance >= 0) & ((distance < 11 - sinks) | (order < sinks))
    plain = AutoModelForCausalLM.from_pretrained(tiny_model(kind))
    with torch.no_grad():
        expected = plain(TOKENS, attention_mask=seen.expand(2, 1, length, length)).logits
    assert near(session.logits(TOKENS), expected)
    state, found = session.new_state(), []
    for start, end in ((0, 15), (15, 17), (17, 18), (18, 19), (19, 33), (33, 40)):
        with torch.no_grad():
            found.append(session.step(TOKENS[:, start:end], state))
    assert near(torch.cat(found, dim=1), expected)
    assert state.layers[0].key_parts[0].shape[-2] == 10


def test_a_window_of_codes_and_the_bytes_of_a_step(tiny_model: TinyModel) -> None:
    session = opened(tiny_model("llama"), KvCache(dtype="int8", window=16))
    wide = opened(tiny_model("llama"), KvCache(dtype="int8"))
    assert session.logits(TOKENS[:, :16]).equal(wide.logits(TOKENS[:, :16]))
    assert not session.logits(TOKENS).allclose(wide.logits(TOKENS))
    assert session.decode_bytes(1, 200) == session.decode_bytes(1, 16) == wide.decode_bytes(1, 16)


@pytest.mark.parametrize(("length", "kept"), [(0, []), (4, [0, 1, 2, 3]), (5, [0, 2, 3, 4]), (9, [0, 6, 7, 8])])
def test_which_tokens_are_kept(length: int, kept: list[int]) -> None:
    assert kept_tokens(length, window=5, sinks=1).tolist() == kept
    rows: Tensor = visible(length, 2, 5, 1)
    assert rows.shape == (2, len(kept) + 2)
    assert rows.sum(1).max() <= 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "set dtype, window, or both"),
        ({"window": 8, "group_size": 16}, "floats have no groups: leave group_size out, or set dtype: int8"),
        ({"dtype": "int8", "sinks": 4}, "sinks belong to a window: set window too"),
        (
            {"window": 8, "sinks": 7},
            "a window of 8 tokens has no room for 7 sinks, the token itself and the one before it",
        ),
    ],
)
def test_fields_that_do_not_fit_together(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        KvCache.model_validate(fields)


def test_what_it_says_of_itself() -> None:
    assert KvCache(window=1024).describe("cpu") == "kv_cache: a window of 1024 tokens, 4 of them the first"
    assert (
        KvCache(dtype="int4", window=64, sinks=0).describe("cpu") == "kv_cache: int4, a window of "
        "64 tokens, 0 of them the first"
    )


def test_windows_of_the_models_own_are_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(StageError, match=r"kv_cache\.window: the model's layers have windows of their own"):
        opened(tiny_model("gemma3"), KvCache(window=8))


def test_attention_that_makes_its_own_mask_is_refused_by_the_plan() -> None:
    shape = ModelShape({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}, {})
    with pytest.raises(StageError, match=r"^kv_cache\.window: the attention of bloom takes no mask .* Take window out"):
        KvCache(window=8).check(shape, "cpu")


def test_speculation_beside_a_window_is_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(StageError, match="a window has forgotten others for them"):
        opened(tiny_model("llama"), KvCache(window=8), Speculative(prompt_lookup=2))


def test_attention_that_takes_no_mask_is_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(
        StageError, match=r"kv_cache\.window: flex_attention takes no mask of a window\. Use sdpa or eager attention"
    ):
        opened(tiny_model("llama"), Attention(implementation="flex_attention"), KvCache(window=8))


def test_attention_that_takes_no_such_mask_is_refused(tmp_path: Path) -> None:
    bloom = save_model("bloom", tmp_path / "bloom")
    message = "kv_cache.window: the attention of bloom takes no mask of what each token sees. too many values to unpack"
    with pytest.raises(StageError, match=message):
        opened(bloom, KvCache(window=9))


def test_a_recipe_names_it() -> None:
    recipe = load_recipe({"model": "smollm2-135m", "stages": [{"kv_cache": {"window": 256}}]})
    assert recipe.settings[0].value == KvCache(window=256, sinks=4)
