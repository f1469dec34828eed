"""An adapter beside packed weights: read, applied when the artifact is opened, and the same as
peft's own.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optkit.errors import SourceError
from optkit.model.adapter import CONFIG, WEIGHTS, read_adapter
from optkit.session import open_session
from optkit.source.models import ModelSource, pin_model
from optkit.stages.nf4 import Nf4
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel
from tests.support.changes import change_json
from tests.support.running import run_stage

RANK, ALPHA = 4, 8.0


def tokens() -> torch.Tensor:
    return torch.randint(0, 512, (2, 16), generator=torch.Generator().manual_seed(3))


def opened_by_peft(directory: Path) -> Any:
    """Return what transformers and peft open, as anybody would."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    method = json.loads((directory / "config.json").read_text())["quantization_config"]["quant_method"]
    how = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if method == "compressed-tensors" else {}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", device_map={"": "cpu"}, **how)
    return PeftModel.from_pretrained(model, directory / "adapter").eval()


def adapt(directory: Path, layers: dict[str, int]) -> None:
    """Write a random adapter with peft: layer -> rank."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    asked = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=list(layers),
        rank_pattern={name: rank for name, rank in layers.items() if rank != RANK},
        alpha_pattern={name: ALPHA / RANK * rank for name, rank in layers.items() if rank != RANK},
    )
    adapted = get_peft_model(model, asked)
    torch.manual_seed(5)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.1)
    adapted.save_pretrained(directory / "adapter")


@pytest.fixture
def adapted(tiny_model: TinyModel, tmp_path: Path) -> Path:
    directory = tmp_path / "adapted"
    run_stage(Rtn(group_size=32), tiny_model("llama"), directory)
    adapt(directory, {"model.layers.0.self_attn.q_proj": RANK, "model.layers.1.mlp.down_proj": 2})
    return directory


@pytest.mark.parametrize("stage", [Rtn(group_size=32), Nf4(exclude=("*.k_proj", "*.v_proj"))])
def test_what_is_opened_computes_what_peft_computes(tiny_model: TinyModel, tmp_path: Path, stage: Any) -> None:
    directory = tmp_path / "adapted"
    run_stage(stage, tiny_model("qwen2"), directory)
    before = open_session(directory).logits(tokens())
    adapt(directory, {"model.layers.0.self_attn.q_proj": RANK, "model.layers.1.mlp.down_proj": 2})
    session = open_session(directory)
    ours = session.logits(tokens())
    with torch.no_grad():
        theirs = opened_by_peft(directory)(tokens()).logits
    assert (ours - before).abs().max() > 0.1
    # bitsandbytes multiplies in bfloat16 here
    assert (ours - theirs).abs().max() < (2e-5 if isinstance(stage, Rtn) else 0.05)
    assert any(note.startswith("adapter: LoRA of rank 2 and 4 beside 2 layers") for note in session.notes)


def test_generation_goes_through_the_adapter(adapted: Path) -> None:
    session = open_session(adapted)
    prompt = tokens()[:1, :8]
    written = session.generate(prompt, 6)
    for end in range(8, 14):
        assert written[0, end] == session.logits(written[:, :end])[0, -1].argmax()


def test_its_layers_and_scales(adapted: Path) -> None:
    found = read_adapter(adapted)
    assert found is not None
    assert found.ranks == (2, 4)
    assert {(name, layer.rank, layer.scale) for name, layer in found.layers.items()} == {
        ("model.layers.0.self_attn.q_proj", 4, 2.0),
        ("model.layers.1.mlp.down_proj", 2, 2.0),
    }
    assert found.size_bytes == 4 * (4 * (64 + 64) + 2 * (64 + 128))
    assert read_adapter(adapted / "adapter") is None


def test_a_model_with_another_adapter_is_another_model(adapted: Path, tmp_path: Path) -> None:
    def pinned() -> str | None:
        return pin_model(ModelSource(name=str(adapted)), tmp_path / "cache").revision

    before = pinned()
    held = load_file(adapted / "adapter" / WEIGHTS)
    save_file({name: 2 * tensor for name, tensor in held.items()}, adapted / "adapter" / WEIGHTS)
    assert pinned() != before


def change_config(directory: Path, **fields: object) -> None:
    change_json(directory / "adapter" / CONFIG, **fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"use_dora": True}, "the adapter asks for use_dora. optkit applies plain LoRA alone"),
        ({"peft_type": "IA3"}, "the adapter asks for peft_type IA3"),
        ({"r": 8}, "says rank 8 and alpha 8.0, and its weights have rank 4"),
    ],
)
def test_what_is_not_plain_lora_is_refused(adapted: Path, fields: dict[str, Any], said: str) -> None:
    change_config(adapted, **fields)
    with pytest.raises(SourceError, match=said):
        open_session(adapted)


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
DAMAGES: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    r"lora_A.weight \[3, 64\], lora_B.weight \[64, 4\] are no product": lambda held: held | {A: held[A][:3].clone()},
    "weights of the adapter are NaN or Inf": lambda held: held | {A: torch.full_like(held[A], torch.nan)},
    "lm_head.weight is no half of a LoRA": lambda held: held | {"base_model.model.lm_head.weight": held[A].clone()},
    "a layer of 64 x 128, which is not there": lambda held: {
        name.replace("layers.1", "layers.7"): each for name, each in held.items()
    },
    "a layer of 64 x 64, which is 32 x 64 there": lambda held: {
        name.replace("q_proj", "k_proj"): each for name, each in held.items()
    },
}


@pytest.mark.parametrize("said", DAMAGES)
def test_a_damaged_adapter_is_refused(adapted: Path, said: str) -> None:
    path = adapted / "adapter" / WEIGHTS
    save_file(DAMAGES[said](load_file(path)), path)
    change_config(adapted, rank_pattern={"down_proj": 2}, alpha_pattern={"down_proj": 4})
    with pytest.raises(SourceError, match=said):
        open_session(adapted)


def test_half_an_adapter_is_refused(adapted: Path) -> None:
    (adapted / "adapter" / WEIGHTS).unlink()
    with pytest.raises(SourceError, match=f"there is no {WEIGHTS}"):
        open_session(adapted)
    (adapted / "adapter" / CONFIG).write_text("{}")
    with pytest.raises(SourceError, match="is no configuration of peft"):
        open_session(adapted)
    shutil.rmtree(adapted / "adapter")
    open_session(adapted)
