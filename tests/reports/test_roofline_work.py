"""The counts behind the roofline, against torch's own counter of operations and the tensors of
opened models.
"""

import random
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache

from optkit.errors import SourceError, UsageError
from optkit.model.attention import AttentionLayer, attention_of
from optkit.model.checkpoint import Checkpoint
from optkit.model.shape import ModelShape, TensorInfo
from optkit.model.weights import weights_of
from optkit.reports.roofline.forms import parse_form
from optkit.reports.roofline.work import Work, work_of
from optkit.session import open_session
from tests.conftest import TinyModel
from tests.support.packed_models import save_packed

DENSE = ("llama", "qwen2", "gemma", "gpt2", "gptj", "opt")
SPARSE = ("mixtral", "qwen2_moe", "gpt_oss")
STORED = parse_form("stored", "fp32")


def opened(directory: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("kind", DENSE)
def test_operations_are_those_that_torch_counts(tiny_model: TinyModel, kind: str) -> None:
    """torch counts products that a causal mask throws away too: all prompt x prompt pairs."""
    work = work_of(Checkpoint(tiny_model(kind)).shape)
    model = opened(tiny_model(kind))
    batch, prompt = 2, 7
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.ones(batch, prompt, dtype=torch.int64), past_key_values=cache, logits_to_keep=1)
    masked = batch * sum(layer.flops(prompt * prompt - layer.pairs(prompt, 0)) for layer in work.attention)
    counted = (
        sum(work.matrix_flops(STORED, batch * prompt, batch).values()) + work.attention_flops(batch, prompt, 0) + masked
    )
    assert abs(counter.get_total_flops() - counted) <= ROTARY[kind] * batch * prompt
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.ones(batch, 1, dtype=torch.int64), past_key_values=cache)
    counted = sum(work.matrix_flops(STORED, batch, batch).values()) + work.attention_flops(batch, 1, prompt)
    assert abs(counter.get_total_flops() - counted) <= ROTARY[kind] * batch


ROTARY = {"llama": 16, "qwen2": 16, "gemma": 16, "gpt2": 0, "gptj": 0, "opt": 0}
"""Operations a token that transformers spends on angles, as a product of positions and frequencies."""


@pytest.mark.parametrize("kind", [*DENSE, "gemma3", *SPARSE])
@pytest.mark.parametrize("context", [5, 40])
def test_bytes_are_those_of_the_tensors_of_an_opened_model(tiny_model: TinyModel, kind: str, context: int) -> None:
    work = work_of(Checkpoint(tiny_model(kind)).shape)
    session = open_session(tiny_model(kind))
    buffers = sum(each.numel() * each.element_size() for name, each in session.model.named_buffers())
    for batch in (1, 3) if kind in DENSE else (1,):
        counted = work.weight_bytes(STORED, batch) + work.cache_bytes(STORED, batch, context)
        assert abs(counted - session.decode_bytes(batch, context)) <= buffers, (
            batch,
            counted,
            session.decode_bytes(batch, context),
        )


@pytest.mark.parametrize(("method", "bits"), [("compressed-tensors", 4), ("compressed-tensors", 8), ("gptq", 4)])
def test_packed_weights_stand_for_the_weights_of_their_source(
    tiny_model: TinyModel, tmp_path: Path, method: str, bits: int
) -> None:
    save_packed(tiny_model("qwen2"), tmp_path / "packed", tmp_path / "plain", method=method, bits=bits)
    packed = Checkpoint(tmp_path / "packed").shape
    plain = weights_of(Checkpoint(tiny_model("qwen2")).shape)
    found = weights_of(packed)
    assert sum(each.elements for each in found) == sum(each.elements for each in plain)
    assert sum(each.size_bytes for each in found) == packed.size_bytes
    assert {each.role for each in found if each.quantized} == {"blocks"}


def test_experts_that_a_batch_needs_are_those_of_random_routing() -> None:
    work = Work((), (), experts=16, chosen=2, dtype="bf16")
    dice = random.Random(0)
    for tokens in (1, 4, 20):
        needed = [
            len({expert for _ in range(tokens) for expert in dice.sample(range(16), 2)}) / 16 for _ in range(4000)
        ]
        assert work.expert_share(tokens) == pytest.approx(sum(needed) / len(needed), rel=0.01)
    assert Work((), (), 0, 0, "bf16").expert_share(5) == 1


@pytest.mark.parametrize("window", [None, 1, 4, 9, 30])
@pytest.mark.parametrize(("queries", "context"), [(1, 0), (1, 12), (6, 0), (6, 3), (12, 20)])
def test_pairs_of_queries_and_keys(queries: int, context: int, window: int | None) -> None:
    layer = AttentionLayer(8, 8, 16, window)
    seen = [min(position + 1, window or position + 1) for position in range(context, context + queries)]
    assert layer.pairs(queries, context) == sum(seen)


def test_attention_is_read_from_configs_of_many_kinds() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    layers, notes = attention_of({**sizes, "num_key_value_heads": 2, "head_dim": 8}, 2)
    assert layers == (AttentionLayer(32, 32, 32),) * 2
    assert notes == ()
    assert attention_of({"text_config": {**sizes, "sliding_window": 8}}, 1)[0][0] == AttentionLayer(64, 64, 128, 8)
    assert attention_of({**sizes, "sliding_window": 8, "use_sliding_window": False}, 1)[0][0].window is None
    patterned = attention_of({**sizes, "sliding_window": 8, "sliding_window_pattern": 3}, 6)[0]
    assert [layer.window for layer in patterned] == [8, 8, None, 8, 8, None]
    assert attention_of({"n_embd": 64, "n_head": 4, "multi_query": True}, 1)[0][0].cache_width == 32
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    assert attention_of({**sizes, **latent}, 1)[0][0] == AttentionLayer(4 * 192, 4 * 128, 576)
    hybrid, notes = attention_of({**sizes, "layer_types": ["linear_attention", "full_attention"]}, 2)
    assert len(hybrid) == 1
    assert notes == ("the states of layers of the kind linear_attention are not counted",)
    assert attention_of({}, 2)[1] == (
        "attention and KV cache are not counted: config.json does not say how many heads there are",
    )


def test_what_sees_images_is_no_work_of_a_text_token() -> None:
    tensors = {
        "model.vision_tower.layers.0.proj.weight": (8, 8),
        "model.multi_modal_projector.linear.weight": (8, 8),
        "model.language_model.layers.0.mlp.up_proj.weight": (16, 8),
        "model.language_model.layers.1.mlp.up_proj.weight": (16, 8),
        "model.language_model.embed_tokens.weight": (32, 8),
    }
    config = {"text_config": {"num_hidden_layers": 2, "vocab_size": 32, "hidden_size": 8, "num_attention_heads": 1}}
    found = weights_of(ModelShape(config, {name: TensorInfo("BF16", shape) for name, shape in tensors.items()}))
    assert [(each.role, each.elements) for each in found] == [("blocks", 128), ("blocks", 128), ("head", 256)]


def test_other_quantizers_are_counted() -> None:
    """Fused experts in MXFP4 (gpt-oss), FP8 in blocks (DeepSeek), and NF4 (bitsandbytes), as they
    lie on the hub.
    """
    block, head = "model.layers.0", {"lm_head.weight": TensorInfo("BF16", (64, 32))}
    mxfp4 = {
        f"{block}.mlp.experts.gate_up_proj_blocks": TensorInfo("U8", (4, 64, 1, 16)),
        f"{block}.mlp.experts.gate_up_proj_scales": TensorInfo("U8", (4, 64, 1)),
        f"{block}.mlp.experts.gate_up_proj_bias": TensorInfo("BF16", (4, 64)),
    }
    (experts, _) = weights_of(ModelShape({"quantization_config": {"quant_method": "mxfp4"}}, mxfp4 | head))
    assert (experts.role, experts.elements, experts.others) == ("experts", 4 * 64 * 32, 4 * 64)
    assert experts.size_bytes == 4 * 64 * 16 + 4 * 64 + 4 * 64 * 2
    fp8 = {
        f"{block}.mlp.up_proj.weight": TensorInfo("F8_E4M3", (256, 128)),
        f"{block}.mlp.up_proj.weight_scale_inv": TensorInfo("F32", (2, 1)),
    }
    (layer, _) = weights_of(ModelShape({"quantization_config": {"quant_method": "fp8"}}, fp8 | head))
    assert (layer.elements, layer.size_bytes, layer.arithmetic) == (256 * 128, 256 * 128 + 8, "fp8")
    nf4 = {
        f"{block}.mlp.up_proj.weight": TensorInfo("U8", (256 * 64, 1)),
        f"{block}.mlp.up_proj.weight.absmax": TensorInfo("F32", (512,)),
        f"{block}.mlp.up_proj.weight.quant_state.bitsandbytes__nf4": TensorInfo("U8", (80,)),
    }
    (layer, _) = weights_of(
        ModelShape({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, nf4 | head)
    )
    assert (layer.elements, layer.size_bytes, layer.quantized) == (256 * 128, 256 * 64 + 2048 + 80, True)
    groups = {
        "group_0": {"format": "float-quantized", "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
    }
    groups["group_0"]["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": True}
    stored = {
        f"{block}.mlp.up_proj.weight": TensorInfo("F8_E4M3", (8, 8)),
        f"{block}.mlp.up_proj.weight_scale": TensorInfo("F32", (8, 1)),
    }
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}
    assert weights_of(ModelShape(config, stored | head))[0].arithmetic == "fp8"


def test_models_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(
        SourceError,
        match=r"llama: there is no lm_head and no embedding that could be one\. Looked for embed_out, lm_head",
    ):
        weights_of(
            ModelShape({"model_type": "llama"}, {"model.layers.0.mlp.up_proj.weight": TensorInfo("F32", (8, 8))})
        )
    tensors = {
        "model.layers.0.mlp.up_proj.qweight": TensorInfo("I32", (8, 8)),
        "lm_head.weight": TensorInfo("F32", (8, 8)),
    }
    with pytest.raises(
        SourceError, match=r"up_proj: its packed weights cannot be counted\. The quantization_config does not say"
    ):
        weights_of(ModelShape({"quantization_config": {"quant_method": "own"}}, tensors))


def test_a_form_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"--forms: 'int3' is no form of weights\. Known: fp32, tf32, bf16, fp16, int8, fp8, int4gN"
    ):
        parse_form("int3", "bf16")
    with pytest.raises(UsageError, match="'int4g4' is no form"):
        parse_form("int4g4", "bf16")
    assert parse_form("int4g128", "bf16").bits == 4.25
    assert parse_form("int4g64", "bf16").label == "int4 g64"
