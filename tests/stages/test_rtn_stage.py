"""Stage `rtn` on tiny models: what is written, what opens it, and what it says when it cannot work."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optkit.errors import SourceError
from optkit.model.checkpoint import Checkpoint
from optkit.stage import Context
from optkit.stages.rtn import Rtn
from tests.conftest import TinyModel
from tests.stages.test_gptq_stage import weights
from tests.support.changes import change_json
from tests.support.near import near
from tests.support.opened import transformers_logits
from tests.support.predictions import predicted
from tests.support.running import run_stage

LEAVES = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "qweight", "qzeros", "scales", "g_idx")


def quantize(source: Path, target: Path, **fields: Any) -> Checkpoint:
    run_stage(Rtn(**fields), source, target)
    return Checkpoint(target)


def dequantized(packed: Checkpoint, bits: int) -> dict[str, torch.Tensor]:
    """Return the tensors that the packed ones stand for, as a float checkpoint has them."""
    plain = {name: packed.read(name) for name in packed.tensors if name.rpartition(".")[2] not in LEAVES}
    return plain | {f"{name}.weight": tensor.contiguous() for name, tensor in weights(packed.directory, bits).items()}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {}),
        ("llama", {"symmetric": False, "group_size": 32}),
        ("llama", {"bits": 3, "group_size": None}),
        ("llama", {"exclude": ("*.0.mlp.*", "lm_head")}),
        ("qwen2", {"bits": 8, "group_size": None, "symmetric": False}),
        ("qwen2", {"bits": 2, "group_size": 16, "scale_search": "mse"}),
        ("llama", {"bits": 5, "symmetric": False}),
        ("llama", {"bits": 6}),
        ("gemma", {}),
        ("mixtral", {}),
        ("qwen2_moe", {"bits": 8}),
    ],
)
def test_plain_transformers_computes_the_same(
    tiny_model: TinyModel, tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    pytest.importorskip("compressed_tensors")

    source = tiny_model(kind)
    packed = quantize(source, tmp_path / "packed", **fields)
    shutil.copytree(source, tmp_path / "reference")
    save_file(
        dequantized(packed, fields.get("bits", 4)),
        tmp_path / "reference" / "model.safetensors",
        metadata={"format": "pt"},
    )
    tokens = torch.arange(60).view(2, 30)
    expected, found, original = (
        transformers_logits(place, tokens, dtype=torch.float32)
        for place in (tmp_path / "reference", packed.directory, source)
    )
    assert near(found, expected)
    assert not torch.allclose(found, original, atol=1e-3)


ASYMMETRIC = {"symmetric": False, "group_size": None}
IN_GPTQ = {"format": "gptq", "bits": 8, "group_size": 32}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((kind, {}) for kind in ("llama", "qwen2", "gemma", "mixtral", "qwen2_moe")),
        *((kind, ASYMMETRIC) for kind in ("llama", "qwen2", "gemma")),
        *((kind, IN_GPTQ) for kind in ("llama", "qwen2", "gemma", "mixtral", "qwen2_moe", "gpt2")),
    ],
)
def test_prediction_is_what_is_written(
    tiny_model: TinyModel, tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    source = tiny_model(kind)
    stage = Rtn(**fields)
    report = stage.run(source, tmp_path, Context())
    assert predicted(stage, source, tmp_path).gpu_bytes == 0
    assert report.changed == sum(name.endswith(("weight_packed", "qweight")) for name in Checkpoint(tmp_path).tensors)


def test_only_the_chosen_weights_change(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("qwen2")
    packed = quantize(source, tmp_path / "packed", include=("*.mlp.*",), exclude=("*.1.mlp.down_proj",))
    before, after = load_file(source / "model.safetensors"), load_file(packed.directory / "model.safetensors")
    chosen = {f"model.layers.{index}.mlp.{leaf}_proj" for index in (0, 1) for leaf in ("gate", "up", "down")}
    chosen -= {"model.layers.1.mlp.down_proj"}
    assert {name.removesuffix(".weight_packed") for name in after if name.endswith(".weight_packed")} == chosen
    for name, tensor in before.items():
        if name.removesuffix(".weight") not in chosen:
            assert torch.equal(after[name], tensor)
    ignored = packed.quantization["ignore"]
    assert ignored == sorted(ignored)
    assert {"lm_head", "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"} <= set(ignored)
    assert not chosen & set(ignored)
    assert (packed.directory / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_rounding_error_is_within_half_a_step(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("llama")
    before = load_file(source / "model.safetensors")
    packed = quantize(source, tmp_path / "packed")
    for name, tensor in dequantized(packed, 4).items():
        if "_proj" in name:
            step = packed.read(name.replace("weight", "weight_scale")).repeat_interleave(64, 1)
            assert ((before[name] - tensor).abs() <= step * 0.5001).all()


def test_report_counts_the_bits_of_the_written_file(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("llama")
    report = Rtn().run(source, tmp_path, Context())
    size = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    weights = sum(tensor.numel() for tensor in load_file(source / "model.safetensors").values())
    assert report.changed == 21
    assert report.skipped == {"lm_head": "outside the decoder blocks"}
    assert report.details["bits_per_weight"] == pytest.approx(8 * size / weights, abs=1e-4)
    # 4 bits, a float32 scale for 64 weights, and 16 bytes of shape for each layer
    assert report.details["quantized_bits_per_weight"] == pytest.approx(4 + 0.5 + 21 * 128 / (3 * 36864), abs=1e-3)
    assert report.calibrated_on == ()


def test_scales_have_the_dtype_of_the_weights(tmp_path: Path, model: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    packed = quantize(model, tmp_path / "packed")
    assert packed.tensors["model.layers.0.mlp.up_proj.weight_scale"].dtype == "BF16"
    assert packed.tensors["model.norm.weight"].dtype == "BF16"
    in_gptq = quantize(model, tmp_path / "gptq", format="gptq")
    assert in_gptq.tensors["model.layers.0.mlp.up_proj.scales"].dtype == "F16"


def test_conv1d_is_turned_for_gptq_format(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("gpt2")
    before = load_file(source / "model.safetensors")
    packed = quantize(source, tmp_path / "packed", format="gptq", bits=8, group_size=32)
    assert packed.tensors["transformer.h.0.mlp.c_fc.qweight"].shape == (16, 256)
    assert (
        packed.tensors["transformer.h.0.mlp.c_fc.bias"] == Checkpoint(source).tensors["transformer.h.0.mlp.c_fc.bias"]
    )
    weight = dequantized(packed, 8)["transformer.h.0.mlp.c_fc.weight"].T.float()
    assert torch.allclose(weight, before["transformer.h.0.mlp.c_fc.weight"], atol=0.01)
    assert json.loads((packed.directory / "quantize_config.json").read_text()) == packed.quantization


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class MineConfig(LlamaConfig):
    model_type = "mine"
class Mine(LlamaForCausalLM):
    config_class = MineConfig
"""


def test_a_model_with_code_of_its_own_is_quantized_where_the_recipe_trusts_it(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = shutil.copytree(tiny_model("llama"), tmp_path / "mine")
    places = {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.Mine"}
    change_json(source / "config.json", auto_map=places, model_type="mine")
    (source / "modeling_mine.py").write_text(CODE)
    with pytest.raises(SourceError, match="trust_remote_code: true"):
        quantize(source, tmp_path / "refused")
    run_stage(Rtn(), source, tmp_path / "trusted", Context(trust_remote_code=True))
    plain = quantize(tiny_model("llama"), tmp_path / "plain")
    assert load_file(tmp_path / "trusted" / "model.safetensors").keys() == plain.tensors.keys()
    assert (tmp_path / "trusted" / "modeling_mine.py").is_file()
