from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
from pydantic import ValidationError
from transformers import AutoConfig, PreTrainedConfig

from optkit.errors import MissingPackageError, StageError
from optkit.model.compiling import RECOMPILE_LIMIT
from optkit.model.shape import ModelShape
from optkit.session import open_session
from optkit.settings import attention
from optkit.settings.attention import Attention
from tests.support.planning import plan_of


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_the_model_is_opened_with_it(implementation: str, device: str) -> None:
    setting = Attention.model_validate({"implementation": implementation})
    assert setting.load_kwargs(device) == {"attn_implementation": implementation}
    assert setting.describe(device) == f"attention: {implementation}"


def test_flash_attention_needs_a_gpu() -> None:
    with pytest.raises(
        StageError, match=r"^attention: flash_attention_2 does not run on cpu\. .*NVIDIA GPUs\. Use sdpa"
    ):
        Attention(implementation="flash_attention_2").load_kwargs("cpu")


def test_flash_attention_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Attention(implementation="flash_attention_2")
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    with pytest.raises(
        MissingPackageError, match=r"the package `flash-attn` is not installed.*pip install 'flash-attn'"
    ):
        setting.load_kwargs("cuda")
    monkeypatch.setattr(attention, "find_spec", lambda name: object())
    assert setting.load_kwargs("cuda") == {"attn_implementation": "flash_attention_2"}


def test_flash_attention_3_needs_its_package_and_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    setting, shape = Attention(implementation="flash_attention_3"), ModelShape({}, {})
    with pytest.raises(StageError, match=r"^attention: flash_attention_3 does not run on cpu"):
        setting.check(shape, "cpu")
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    with pytest.raises(
        MissingPackageError, match=r"`flash-attn-3` is not installed\. Run: git clone .*flash-attention/hopper"
    ):
        setting.check(shape, "cuda")
    monkeypatch.setattr(attention, "find_spec", lambda name: object() if name == "flash_attn_interface" else None)
    for capability, refused in (((8, 0), True), ((10, 0), True), ((9, 0), False), (None, False)):
        monkeypatch.setattr(attention, "compute_capability", lambda device, capability=capability: capability)
        if refused:
            with pytest.raises(
                StageError, match=r"does not run on this GPU \(compute capability .*Hopper \(9\.0\)\. Use flash"
            ):
                setting.check(shape, "cuda")
        else:
            setting.check(shape, "cuda")


def test_flash_attention_is_refused_at_plan_time(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(StageError, match="flash_attention_2 does not run on cpu"):
        plan_of({"model": str(tiny_model("llama")), "stages": ["flash_attention_2"]}, tmp_path)


def test_flash_attention_needs_half_precision() -> None:
    setting = Attention(implementation="flash_attention_2")
    with pytest.raises(
        StageError, match=r"^attention: flash_attention_2 does not compute in float32\. .*cast: \{dtype: bfloat16\}"
    ):
        setting.on_load(SimpleNamespace(dtype=torch.float32, config=AutoConfig.for_model("llama")), "cuda")
    model = SimpleNamespace(dtype=torch.bfloat16, config=AutoConfig.for_model("llama"))
    assert setting.on_load(model, "cuda") is model


def test_flex_attention_has_no_sinks_on_the_cpu(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(
        StageError, match=r"^attention: flex_attention has no attention sinks on the CPU.*layers\.0.*\.sinks.*Use eager"
    ):
        open_session(tiny_model("gpt_oss"), [Attention(implementation="flex_attention")])
    open_session(tiny_model("llama"), [Attention(implementation="flex_attention")])


def test_flex_attention_has_no_sliding_windows_on_the_cpu(tiny_model: Callable[[str], Path]) -> None:
    message = (
        r"^attention: flex_attention cannot generate with a sliding window on the CPU\. .* see 8 "
        r"tokens back\. Use sdpa or eager"
    )
    with pytest.raises(StageError, match=message):
        open_session(tiny_model("gemma3"), [Attention(implementation="flex_attention")])


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (AutoConfig.for_model("mistral", sliding_window=4096), True),
        (AutoConfig.for_model("mistral", sliding_window=None), False),
        (AutoConfig.for_model("mistral", sliding_window=512, max_position_embeddings=512), False),
        (AutoConfig.for_model("qwen2", use_sliding_window=False), False),
        (AutoConfig.for_model("qwen2", use_sliding_window=True, max_window_layers=28), True),
        (AutoConfig.for_model("gpt2"), False),
    ],
)
def test_which_models_have_sliding_windows(config: PreTrainedConfig, refused: bool) -> None:
    model = SimpleNamespace(config=config, named_parameters=lambda: (), dtype=torch.float32)
    setting = Attention(implementation="flex_attention")
    if refused:
        with pytest.raises(StageError, match=r"tokens back"):
            setting.on_load(model, "cpu")
    else:
        assert setting.on_load(model, "cpu") is model
    assert setting.on_load(model, "cuda") is model


def test_shapes_that_torch_no_longer_compiles_are_told(tiny_model: Callable[[str], Path]) -> None:
    sessions = [
        open_session(tiny_model("llama"), [Attention(implementation=kind)]) for kind in ("flex_attention", "sdpa")
    ]
    assert torch._dynamo.config.recompile_limit == RECOMPILE_LIMIT
    assert [session.notes for session in sessions] == [(), ()]
    double = torch.compile(lambda tensor: tensor * 2, dynamic=False, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        for length in (3, 4, 5):
            double(torch.ones(length))
    assert [session.notes for session in sessions] == [
        (
            "torch compiled a function for 64 shapes and ran it uncompiled for others: ask "
            "for fewer batches and lengths",
        ),
        (),
    ]
    sessions[0].close()
    assert open_session(tiny_model("llama"), [Attention(implementation="flex_attention")]).notes == ()


def test_unknown_implementations_and_fields_are_refused() -> None:
    for fields in ({}, {"implementation": "flash"}, {"implementation": "sdpa", "window": 3}):
        with pytest.raises(ValidationError):
            Attention.model_validate(fields)
