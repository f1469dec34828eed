"""Attention keeps what a model asks for: tiny models with a soft cap of 0.5, next to transformers'
eager attention.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForImageTextToText, DogeConfig, DogeForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from optkit.errors import StageError
from optkit.model.attention_choice import ASKED, attends_eagerly, attention_options, why_not_attention
from optkit.model.checkpoint import Checkpoint
from optkit.plan import make_plan
from optkit.recipe.recipe import load_recipe
from optkit.session import open_session
from optkit.session.static_caches import static_cache
from optkit.settings.attention import Attention
from optkit.settings.kv_cache import KvCache
from optkit.settings.speculative import Speculative
from optkit.stage import Context
from optkit.stages.prune import Prune
from optkit.stages.rtn import Rtn
from optkit.store.store import Store
from optkit.training.student import open_student
from optkit.training.teacher import LiveTeacher
from tests.conftest import TinyModel
from tests.support.changes import changed_copy
from tests.support.near import near
from tests.support.skeletons import logits_of, reference, some_tokens
from tests.support.vision_models import save_vision_model

TOKENS = some_tokens(2)
PLAIN: Any = {
    "max_new_tokens": 12,
    "min_new_tokens": 12,
    "do_sample": False,
    "attention_mask": torch.ones_like(TOKENS),
    "pad_token_id": 0,
}


def eager_logits(directory: Path, attention: str = "eager") -> Tensor:
    with torch.no_grad():
        return reference(directory, attention=attention)(TOKENS).logits


def test_models_that_ask_for_more_are_those_of_transformers() -> None:
    """Encoders, vision models and models with an encoder and a decoder aside."""
    found: dict[str, str] = {}
    models = Path(transformers.__file__).parent / "models"
    for place in models.glob("*/modeling_*.py"):
        for call in re.findall(
            r"= attention_interface\((.*?)^ {8}\)", place.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        ):
            for argument in re.findall(r"^ +(softcap|s_aux|position_bias)=", call, re.MULTILINE):
                found.update(
                    {kind: argument for kind in (place.parent.name, f"{place.parent.name}_text") if kind in CAUSAL}
                )
    named = {**found, "umt5": "own_products", "doge": "own_mask"}
    assert named == ASKED  # Doge makes a mask, and forgets the causal one beside sdpa


def test_a_mask_of_its_own_leaves_no_token_to_see_ahead(tmp_path: Path) -> None:
    """Beside sdpa transformers gives Doge no causal mask, and Doge makes none."""
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)
    config = DogeConfig(**sizes, hidden_size=32, intermediate_size=48, vocab_size=512)
    DogeForCausalLM(config).save_pretrained(tmp_path)
    session = open_session(tmp_path)
    why = "sdpa leaves out the causal mask beside the mask of its own of doge"
    assert session.notes == (f"attention: eager, because {why}",)
    changed = TOKENS.clone()
    changed[:, 8:] = 1
    assert near(session.logits(TOKENS)[:, :8], session.logits(changed)[:, :8])


@pytest.mark.parametrize("kind", ["gemma2", "vaultgemma"])
def test_everything_that_opens_a_model_keeps_its_cap(kind: str, tiny_model: TinyModel) -> None:
    directory = tiny_model(kind)
    expected = eager_logits(directory)
    assert (expected - eager_logits(directory, "sdpa")).abs().max() > 0.1
    session = open_session(directory)
    assert session.notes == (f"attention: eager, because sdpa leaves out the soft cap of the scores of {kind}",)
    assert near(session.logits(TOKENS), expected)
    assert near(logits_of(directory)[:2], expected)
    with torch.no_grad():
        assert near(open_student(directory, "cpu").model(TOKENS).logits, expected)
    taught = LiveTeacher(directory, "cpu").targets(range(2), TOKENS).logits(slice(0, TOKENS.numel()))
    assert near(taught, expected.flatten(0, 1))


def test_a_quantized_model_keeps_its_cap(tiny_model: TinyModel, target: Path) -> None:
    Rtn(bits=8, group_size=32).run(tiny_model("gemma2"), target, Context())
    session = open_session(target)
    expected = eager_logits(tiny_model("gemma2"))
    assert (session.logits(TOKENS) - expected).norm() / expected.norm() < 0.03
    assert session.model.config._attn_implementation == "eager"


def test_an_artifact_keeps_its_cap_in_plain_transformers(tiny_model: TinyModel, target: Path) -> None:
    Prune(method="magnitude", sparsity=0.1).run(tiny_model("gemma2"), target, Context())
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    assert model.config._attn_implementation == "eager"
    with torch.no_grad():
        assert near(model(TOKENS).logits, eager_logits(target))
    asked = transformers.AutoModelForCausalLM.from_pretrained(target, attn_implementation="sdpa")
    assert asked.config._attn_implementation == "sdpa"


def test_what_decodes_keeps_the_cap(tiny_model: TinyModel) -> None:
    """A KV cache of floats, one of codes and a static one, as compiled steps have it; a window
    beside the model's own is refused.
    """
    directory = tiny_model("gemma2")
    plain = open_session(directory)
    expected = reference(directory, attention="eager").generate(TOKENS, **PLAIN)
    assert plain.generate(TOKENS, 12).equal(expected)
    with torch.no_grad():
        model: Any = plain.model
        kept = model(TOKENS, past_key_values=static_cache(model.config, 128), use_cache=True).logits
    logits = eager_logits(directory)
    assert near(kept, logits)
    coded = open_session(directory, [KvCache(dtype="int8")]).logits(TOKENS)
    assert (coded - logits).norm() / logits.norm() < 0.03
    with pytest.raises(StageError, match="the model's layers have windows of their own"):
        open_session(directory, [KvCache(window=8)])


def test_speculation_keeps_the_cap(tiny_model: TinyModel, tmp_path: Path) -> None:
    """It has no sliding windows: those are refused."""
    directory = changed_copy(tiny_model("gemma2"), tmp_path, layer_types=["full_attention"] * 2)
    expected = reference(directory, attention="eager").generate(TOKENS, **PLAIN)[:1]
    assert not reference(directory).generate(TOKENS, **PLAIN)[:1].equal(expected)
    assert open_session(directory, [Speculative(early_exit=1)]).generate(TOKENS[:1], 12).equal(expected)


def test_a_model_without_its_cap_is_opened_as_ever(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = changed_copy(tiny_model("gemma2"), tmp_path, attn_logit_softcapping=None)
    session = open_session(directory, [Attention(implementation="sdpa")])
    assert (
        open_session(directory).model.config._attn_implementation == session.model.config._attn_implementation == "sdpa"
    )
    assert session.notes == ()
    assert near(session.logits(TOKENS), eager_logits(directory))
    assert not attends_eagerly(Checkpoint(directory).config)


@pytest.mark.parametrize(
    ("kind", "implementation", "why"),
    [
        ("gemma2", "sdpa", r"sdpa leaves out the soft cap of the scores"),
        ("vaultgemma", "sdpa", r"sdpa leaves out the soft cap of the scores"),
        ("gpt_oss", "sdpa", r"sdpa leaves out attention sinks"),
        ("gpt_oss", "flash_attention_2", r"flash_attention_2 leaves out attention sinks"),
        ("gptj", "sdpa", r"transformers has the attention of this model as matrix products alone"),
    ],
)
def test_what_leaves_something_out_is_refused_at_plan_time(
    kind: str, implementation: str, why: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    recipe = load_recipe({"model": str(tiny_model(kind)), "stages": [{"attention": implementation}]}).pinned(None)
    message = rf"^attention: {implementation} does not compute the attention of {kind}\. {why}\. Use eager"
    with pytest.raises(StageError, match=message):
        make_plan(recipe, Store(tmp_path), "cpu")


def test_sdpa_is_refused_where_no_plan_was_made(tiny_model: TinyModel) -> None:
    with pytest.raises(
        StageError, match=r"sdpa does not compute the attention of gemma2\. sdpa leaves out the soft cap"
    ):
        open_session(tiny_model("gemma2"), [Attention(implementation="sdpa")])


def test_the_others_are_as_they_were(tiny_model: TinyModel) -> None:
    assert open_session(tiny_model("gemma2"), [Attention(implementation="eager")]).notes == ()
    for kind in ("llama", "gemma3"):
        config = Checkpoint(tiny_model(kind)).config
        assert not any(
            why_not_attention(config, each) for each in ("eager", "sdpa", "flex_attention", "flash_attention_2")
        )
        assert attention_options(config, {}) == {}
    for kind in ("gemma2", "vaultgemma"):
        # the cap is 50 if config.json does not say
        config = {"model_type": "seen", "text_config": {"model_type": kind}}
        assert attention_options(config, {"device_map": "cpu"}) == {"attn_implementation": "eager", "device_map": "cpu"}
        assert attention_options(config, {"attn_implementation": "flex_attention"}) == {
            "attn_implementation": "flex_attention"
        }
        assert not any(
            why_not_attention(config, each)
            for each in ("eager", "flex_attention", "flash_attention_2", "flash_attention_3")
        )
    assert attention_options({"model_type": "gpt_oss"}, {}) == {}


@pytest.mark.parametrize("kind", ["paligemma", "paligemma2"])
def test_a_text_is_causal_though_prompts_are_seen_whole(kind: str, tmp_path: Path) -> None:
    """Without `token_type_ids` transformers' sdpa lets each token of PaliGemma see those behind it."""
    source, tokens = save_vision_model(kind, tmp_path), torch.arange(1, 25)[None]
    session = open_session(source)
    told = {"dtype": torch.float32, "attn_implementation": "sdpa" if kind == "paligemma" else "eager"}
    plain = AutoModelForImageTextToText.from_pretrained(source, **told).eval()
    with torch.no_grad():
        causal = plain(input_ids=tokens, token_type_ids=torch.ones_like(tokens)).logits
        seen = plain(input_ids=tokens, token_type_ids=torch.zeros_like(tokens)).logits
    torch.testing.assert_close(session.logits(tokens), causal, atol=1e-4, rtol=0)
    torch.testing.assert_close(session.stepped_logits(tokens, 12), causal[:, 12:], atol=1e-4, rtol=0)
    inputs = {"input_ids": tokens, "token_type_ids": torch.zeros_like(tokens)}
    torch.testing.assert_close(session.prompt_logits(inputs), seen, atol=1e-4, rtol=0)
    assert (causal - seen).abs().max() > 1
    assert any("sdpa leaves out the causal mask of a text that is no prompt" in note for note in session.notes)
