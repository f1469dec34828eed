from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from optkit.algorithms.state_codes import Float8Code, IntegerCode, PlainCode, StateCode
from optkit.errors import StageError
from optkit.kernels.kv_cache import CodedLayer, coded_cache
from optkit.session import open_session
from optkit.session.torch_session import TorchSession
from optkit.settings.compile import Compile
from optkit.settings.kv_cache import KvCache
from optkit.stage import Setting
from tests.conftest import TinyModel

TOKENS = torch.randint(512, (2, 40), generator=torch.Generator().manual_seed(1))
CODES = [
    IntegerCode(8, None),
    IntegerCode(8, 8),
    IntegerCode(4, None),
    IntegerCode(4, 8),
    Float8Code(),
    Float8Code(0.02),
]


def opened(directory: Path, *settings: Setting, **options: Any) -> TorchSession:
    return open_session(directory, settings, **options)  # type: ignore[return-value]


@pytest.mark.parametrize("group_size", [None, 8])
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_rounded_within_their_groups(bits: int, group_size: int | None) -> None:
    states = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 5)[:, None]
    code = IntegerCode(bits, group_size)
    parts = code.encode(states)
    read = code.decode(parts, torch.float32)
    groups = states.unflatten(-1, (-1, group_size or 16))
    step = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / (2**bits - 1)
    error = (read.unflatten(-1, (-1, group_size or 16)) - groups).abs().amax(-1)
    assert bool((error <= 1.01 * step).all())
    assert float((error / step).median()) < 0.6
    assert [part.dtype for part in parts] == [torch.uint8, torch.float16, torch.uint8]
    assert sum(part.nbytes for part in parts) == 2 * 3 * 5 * (16 * bits // 8 + 3 * 16 // (group_size or 16))


def test_float8_is_torchs_and_saturates() -> None:
    states = torch.tensor([[0.1, -3.0, 1e-4, 900.0]])
    read = Float8Code(0.5).decode(Float8Code(0.5).encode(states), torch.float32)
    want = (states / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.5
    assert torch.equal(read, want)
    assert read[0, -1] == 224


@pytest.mark.parametrize("code", CODES, ids=repr)
def test_a_state_of_zeros_and_of_one_value_is_kept(code: StateCode) -> None:
    for states in (torch.zeros(1, 1, 2, 16), torch.full((1, 1, 2, 16), 0.5)):
        assert torch.allclose(code.decode(code.encode(states), torch.float32), states, rtol=0.07)


@pytest.mark.parametrize("code", CODES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_appended_later_changes_nothing_before(code: StateCode, dtype: torch.dtype) -> None:
    keys, values = torch.randn(2, 2, 3, 9, 16, dtype=dtype)
    whole = CodedLayer(code, code).update(keys, values)
    layer = CodedLayer(code, code)
    for start, end in ((0, 4), (4, 5), (5, 9)):
        given = layer.update(keys[..., start:end, :], values[..., start:end, :])
    assert layer.get_seq_length() == 9
    for one, other in zip(whole, given, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)


def test_the_model_attends_to_rounded_keys_and_values(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Independently: transformers' own cache, its states rounded by hand to 15 steps between their
    least and their largest.
    """
    from transformers.cache_utils import DynamicLayer

    real = DynamicLayer.update

    def rounded(states: Tensor) -> Tensor:
        low, high = states.amin(-1, keepdim=True).clamp(max=0), states.amax(-1, keepdim=True).clamp(min=0)
        scale = ((high - low) / 15).half().float()
        zero = (-low / scale).round()
        return ((states / scale + zero).round().clamp(0, 15) - zero) * scale

    def update(layer: Any, keys: Tensor, values: Tensor, *more: Any, **most: Any) -> Any:
        return real(layer, rounded(keys), rounded(values), *more, **most)

    session = opened(tiny_model("llama"), KvCache(dtype="int4"))
    made = session.logits(TOKENS)
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32)
    with torch.no_grad():
        plain = model(TOKENS).logits
        monkeypatch.setattr(DynamicLayer, "update", update)
        want = model(TOKENS, past_key_values=DynamicCache(config=model.config), use_cache=True).logits
    assert (want - plain).abs().max() > 0.02 * plain.abs().max()
    assert torch.allclose(made, want, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("dtype", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "mixtral", "gpt_oss"])
def test_decoding_token_by_token_gives_the_logits_of_the_whole_text(
    tiny_model: TinyModel, kind: str, dtype: str
) -> None:
    session = opened(tiny_model(kind), KvCache(dtype=dtype))  # type: ignore[arg-type]
    whole = session.logits(TOKENS)
    assert session._new_cache is not None
    cache = session._new_cache()
    with torch.inference_mode():
        for start, end in ((0, 20), *((place, place + 1) for place in range(20, 40))):
            step = session.model(input_ids=TOKENS[:, start:end], past_key_values=cache, use_cache=True).logits
            assert torch.allclose(step, whole[:, start:end], atol=1e-3 * float(whole.abs().max())), start
    assert session.generate(TOKENS[:, :4], 12).shape == (2, 16)


@pytest.mark.parametrize(("dtype", "largest"), [("int8", 0.05), ("int4", 0.8), ("fp8", 0.3)])
@pytest.mark.parametrize("model_dtype", ["float32", "bfloat16"])
def test_logits_pass_through_the_cache(tiny_model: TinyModel, dtype: str, largest: float, model_dtype: str) -> None:
    plain = opened(tiny_model("qwen2"), dtype=model_dtype).logits(TOKENS)
    coded = opened(tiny_model("qwen2"), KvCache(dtype=dtype), dtype=model_dtype).logits(TOKENS)  # type: ignore[arg-type]
    difference = float((coded - plain).norm() / plain.norm())
    assert 1e-4 < difference < largest


@pytest.mark.parametrize("kind", ["opt", "llama", "gpt2"])
def test_logits_in_16_bits_fill_the_cache_once(
    tiny_model: TinyModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[int] = []
    real = CodedLayer.update

    def update(layer: CodedLayer, keys: Tensor, *more: Any, **most: Any) -> Any:
        filled.append(keys.shape[-2])
        return real(layer, keys, *more, **most)

    monkeypatch.setattr(CodedLayer, "update", update)
    session = opened(tiny_model(kind), KvCache(dtype="int8"), dtype="bfloat16")
    with torch.no_grad():
        exact = session.model.float()(TOKENS).logits.log_softmax(-1)
    session.model.to(torch.bfloat16)
    made = session.logits(TOKENS).log_softmax(-1)
    assert filled == [40] * session.model.config.num_hidden_layers
    divergence = (exact.exp() * (exact - made)).sum(-1).mean()
    assert float(divergence) < 1e-3  # 3 to 5e-4 here: a cache that is filled twice makes more than 1 of OPT


def test_the_bytes_of_a_decode_step_are_those_of_the_codes(tiny_model: TinyModel) -> None:
    plain = opened(tiny_model("llama"))
    layers, heads, size = 3, 2, 16
    weights = plain.decode_bytes(1, 0)
    assert plain.decode_bytes(2, 100) - plain.decode_bytes(2, 0) == 2 * 100 * layers * heads * size * 2 * 4
    for setting, per_head in (
        (KvCache(dtype="int8"), size + 3),
        (KvCache(dtype="int4"), size // 2 + 3),
        (KvCache(dtype="int4", group_size=8), size // 2 + 6),
        (KvCache(dtype="fp8"), size),
    ):
        session = opened(tiny_model("llama"), setting)
        assert session.decode_bytes(1, 100) - weights == 100 * layers * heads * per_head * 2


def test_a_sliding_layer_holds_its_window_and_no_more(tiny_model: TinyModel) -> None:
    session = opened(tiny_model("gemma3"), KvCache(dtype="int8"))
    assert session._new_cache is not None
    cache = session._new_cache()
    with torch.inference_mode():
        session.model(input_ids=TOKENS, past_key_values=cache, use_cache=True)
    held = [layer.key_parts[0].shape[-2] for layer in cache.layers]
    assert held == [7 if layer.is_sliding else 40 for layer in cache.layers]
    assert {7, 40} == set(held)


def test_layers_of_attention_and_states_code_the_one_and_keep_the_other(tiny_model: TinyModel) -> None:
    plain, coded = (opened(tiny_model("falcon_h1"), *settings) for settings in ((), (KvCache(dtype="int8"),)))
    config = coded.model.config
    exact = coded_cache(config, (PlainCode(), PlainCode()), "kv_cache")()
    with torch.inference_mode():
        whole = plain.logits(TOKENS)
        steps = [
            plain.model(input_ids=part, past_key_values=exact, use_cache=True).logits
            for part in TOKENS.split(20, dim=1)
        ]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-4, rtol=1e-4)
    heads, size, layers = config.num_key_value_heads, 16, config.num_hidden_layers
    floats, codes = (each.decode_bytes(1, 100) - each.decode_bytes(1, 0) for each in (plain, coded))
    assert (floats, codes) == (100 * layers * heads * size * 2 * 4, 100 * layers * heads * (size + 3) * 2)
    assert plain.decode_bytes(2, 0) - plain.decode_bytes(1, 0) > layers * 128 * 8 * 4  # what each layer keeps


@pytest.mark.parametrize("kind", ["falcon_h1", "gemma3"])
def test_sequences_are_reordered_and_forgotten_as_in_transformers_own_cache(tiny_model: TinyModel, kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=torch.float32)
    coded, own = coded_cache(model.config, (PlainCode(), PlainCode()), "kv_cache")(), DynamicCache(config=model.config)

    def step(cache: Any, tokens: Tensor) -> Tensor:
        logits: Tensor = model(tokens, past_key_values=cache).logits
        return logits

    with torch.inference_mode():
        for cache in (coded, own):
            step(cache, TOKENS[:, :20])
            cache.reorder_cache(torch.tensor([1, 1]))
        torch.testing.assert_close(step(coded, TOKENS[:, 20:21]), step(own, TOKENS[:, 20:21]), atol=1e-5, rtol=1e-5)
        coded.reset()
        fresh = DynamicCache(config=model.config)
        torch.testing.assert_close(step(coded, TOKENS), step(fresh, TOKENS), atol=1e-5, rtol=1e-5)


def test_tokens_that_cannot_be_taken_out_of_a_cache(tiny_model: TinyModel) -> None:
    layer = CodedLayer(PlainCode(), PlainCode(), window=4)
    layer.update(*torch.randn(2, 1, 1, 3, 16))
    layer.crop(-1)
    assert (layer.length, layer.key_parts[0].shape[-2]) == (2, 2)
    layer.update(*torch.randn(2, 1, 1, 3, 16))
    with pytest.raises(StageError, match="^kv_cache: the last tokens .* A window of 4 tokens has .* Take kv_cache out"):
        layer.crop(-1)
    config = AutoModelForCausalLM.from_pretrained(tiny_model("falcon_h1")).config
    with pytest.raises(StageError, match="A state of linear attention holds all tokens in one"):
        coded_cache(config, (PlainCode(), PlainCode()), "kv_cache")().crop(-1)


def test_layers_that_hold_other_states_are_refused() -> None:
    from transformers import AutoConfig

    code = IntegerCode(8, None)
    message = r"^kv_cache: the cache of mamba2 has layers of another kind: none are known\. .*Take the"
    with pytest.raises(StageError, match=message):
        coded_cache(AutoConfig.for_model("mamba2", num_hidden_layers=4), (code, code), "kv_cache")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            KvCache(dtype="int8", group_size=12),
            r"^kv_cache: heads of 16 channels are not made of groups of 12\. .*Use 16, 8 or null\.",
        ),
        (KvCache(dtype="int4", group_size=32), r"^kv_cache: heads of 16 channels are not made of groups of 32\. "),
    ],
)
def test_groups_that_do_not_fit_the_heads_are_refused(tiny_model: TinyModel, setting: KvCache, message: str) -> None:
    with pytest.raises(StageError, match=message):
        opened(tiny_model("llama"), setting)


def test_a_compiled_step_is_refused(tiny_model: TinyModel) -> None:
    for settings in (
        (KvCache(dtype="int8"), Compile(devices=("cpu",))),
        (Compile(devices=("cpu",)), KvCache(dtype="int8")),
    ):
        with pytest.raises(
            StageError,
            match=r"(kv_cache|compile) exclude each other\. A KV cache of codes grows with every token.*Take one",
        ):
            opened(tiny_model("llama"), *settings)


def test_an_empty_layer_has_no_token_to_count() -> None:
    with pytest.raises(ValueError, match="holds no token"):
        CodedLayer(Float8Code(), Float8Code()).token_bytes()


def test_fields() -> None:
    assert KvCache(dtype="int4", group_size=32).describe("cpu") == "kv_cache: int4 (groups of 32)"
    assert KvCache(dtype="fp8").describe("cuda") == "kv_cache: fp8"
    with pytest.raises(ValidationError, match="fp8 has one scale for a layer: leave group_size out"):
        KvCache(dtype="fp8", group_size=64)
    for fields in ({}, {"dtype": "int2"}, {"dtype": "int4", "group_size": 0}, {"dtype": "int8", "bits": 8}):
        with pytest.raises(ValidationError):
            KvCache.model_validate(fields)
