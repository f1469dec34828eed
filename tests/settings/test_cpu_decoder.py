from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from optkit.errors import StageError
from optkit.kernels.cpu import huge_pages
from optkit.kernels.cpu.families import DECODES
from optkit.kernels.cpu.native import why_not_native
from optkit.model.shape import ModelShape
from optkit.session import open_session
from optkit.settings.attention import Attention
from optkit.settings.compile import Compile
from optkit.settings.cpu_decoder import CpuDecoder
from optkit.settings.cuda_graphs import CudaGraphs
from optkit.settings.kv_cache import KvCache
from optkit.settings.precision import Precision
from optkit.settings.speculative import Speculative
from optkit.stage import exclusion
from tests.support.packed_models import save_packed


@pytest.mark.skipif(why_not_native() is not None, reason=str(why_not_native()))
def test_a_float_model_decodes_by_the_kernels(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "PAGE_BYTES", 64)
    plain, ours = open_session(tiny_model("llama")), open_session(tiny_model("llama"), [CpuDecoder()])
    assert DECODES in ours.notes
    assert DECODES not in plain.notes
    assert [_in_one_stretch(session.model) for session in (plain, ours)] == [False, True]
    tokens = torch.randint(ours.vocabulary, (2, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours.generate(tokens, 8), plain.generate(tokens, 8))
    assert torch.equal(ours.logits(tokens), plain.logits(tokens))
    save_packed(tiny_model("llama"), tmp_path / "packed", tmp_path / "plain")
    packed = open_session(tmp_path / "packed", [CpuDecoder()])
    assert packed.notes.count(DECODES) == 1


def _in_one_stretch(model: nn.Module) -> bool:
    """Whether the weights of all linear layers lie in the same memory."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    return len({weight.untyped_storage().data_ptr() for weight in weights}) == 1


def test_other_models_are_refused(tiny_model: Callable[[str], Path]) -> None:
    message = r"^cpu_decoder: the decode step of this model cannot be one call: gpt2 is not of the families that it "
    with pytest.raises(StageError, match=message):
        open_session(tiny_model("gpt2"), [CpuDecoder()])
    shape = ModelShape(config={"model_type": "gpt2"}, tensors={})
    with pytest.raises(StageError, match=message):
        CpuDecoder().check(shape, "cpu")
    CpuDecoder().check(shape, "cuda")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"model_type": "mistral"}, "its attention has a sliding window"),  # of transformers' 4,096 tokens
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 8}, None),  # which transformers does not use
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, "its attention has a sliding"),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic"}}, r"its rotary embeddings \(dynamic\) change"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}, None),
        ({"model_type": "llama", "hidden_act": "gelu"}, "the MLP's activation is gelu, not silu"),
    ],
)
def test_what_config_json_tells_is_refused_before_anything_runs(said: dict[str, object], why: str | None) -> None:
    shape = ModelShape(config=said, tensors={})
    if why is None:
        CpuDecoder().check(shape, "cpu")
    else:
        with pytest.raises(StageError, match=rf"cannot be one call: {why}.* Take cpu_decoder out"):
            CpuDecoder().check(shape, "cpu")


@pytest.mark.parametrize(
    "other",
    [Speculative(prompt_lookup=2), KvCache(dtype="int8"), Compile(devices=("cpu",)), Precision(mode="autocast")],
)
def test_what_it_cannot_stand_beside(other: object) -> None:
    found = exclusion([CpuDecoder(), other], "cpu")  # type: ignore[list-item]
    assert found is not None


def test_it_stands_beside_others_and_is_off_on_gpus() -> None:
    setting = CpuDecoder()
    assert exclusion([setting, Attention(implementation="sdpa"), Compile()], "cpu") is None
    assert (setting.describe("cpu"), setting.describe("cuda")) == ("cpu_decoder: on", "cpu_decoder: off on cuda")
    assert (setting.step_mode("cpu"), setting.step_mode("cuda")) == ("cpu_decoder", "")


def test_settings_that_change_nothing_on_a_device() -> None:
    each = [CpuDecoder(), CudaGraphs(), Compile(devices=("cuda",)), Attention(implementation="sdpa")]
    assert [setting.applies("cpu") for setting in each] == [True, False, False, False]
    assert [setting.applies("cuda") for setting in each] == [False, True, True, False]
    assert Attention(implementation="eager").applies("cpu")
