"""Checkpoints in the shapes of models that people ship: random weights, or files with holes in their place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from optkit.model.empty_model import TORCH_DTYPES
from optkit.model.shape import DTYPE_BITS, TensorInfo
from optkit.model.writer import INDEX, SHARD_BYTES, CheckpointWriter, write_config
from tests.support.tiny_models import save_tokenizer

TEMPLATE = 4
"""Blocks that are asked of transformers; those behind are like the last of them."""
TILE = 128
"""Rows and columns of a weight that share a scale in DeepSeek's FP8."""
HALF = {"dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
QWEN3_MOE = {
    **HALF,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
}
SHAPES: dict[str, dict[str, Any]] = {
    "medium": {
        **HALF,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 16384,
    },
    "medium_experts": {
        **HALF,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 768,
        "intermediate_size": 1536,
        "num_hidden_layers": 3,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "vocab_size": 8192,
    },
    "llama3_70b": {
        **HALF,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "vocab_size": 128256,
    },
    "qwen3_30b": {
        **QWEN3_MOE,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen3_235b": {
        **QWEN3_MOE,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
    "deepseek_v3": {
        **HALF,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [TILE, TILE],
        },
    },
    "gpt_oss_20b": {
        **HALF,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_local_experts": 32,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "qwen2_5_vl_7b": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": {
            **HALF,
            "model_type": "qwen2_5_vl_text",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            "vocab_size": 152064,
        },
        "vision_config": {"model_type": "qwen2_5_vl", "depth": 32, "hidden_size": 1280, "intermediate_size": 3420}
        | {"num_heads": 16, "out_hidden_size": 3584},
    },
}
"""What differs from the defaults of transformers' classes."""


def write_random(kind: str, directory: Path, blocks: int | None = None, device: str = "cpu") -> Path:
    """Write a checkpoint of a shape with random weights, made on a device, and a tokenizer of few tokens."""
    config = _config(kind, blocks)
    drawn = torch.Generator(device).manual_seed(0)
    directory.mkdir(parents=True)
    with CheckpointWriter(directory, beside=True) as writer:
        for name, info in stored_tensors(config):
            writer.add(name, _random(name, info, drawn))
    return _beside(directory, config)


def write_holes(kind: str, directory: Path, blocks: int | None = None, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write a checkpoint of a shape with zeros in place of weights, which take no room on the disk."""
    config = _config(kind, blocks)
    directory.mkdir(parents=True)
    shards: list[dict[str, TensorInfo]] = [{}]
    for name, info in stored_tensors(config):
        if shards[-1] and sum(each.size_bytes for each in shards[-1].values()) + info.size_bytes > shard_bytes:
            shards.append({})
        shards[-1][name] = info
    names = {}
    for number, tensors in enumerate(shards, start=1):
        file = directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_header(file, tensors)
        names |= dict.fromkeys(tensors, file.name)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}), encoding="utf-8")
    return _beside(directory, config)


def stored_tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the tensors of a checkpoint with such a config.json, block after block, as they are published."""
    text = config.get("text_config", config)
    few = _with_blocks(config, min(TEMPLATE, text["num_hidden_layers"]))
    built = transformers.AutoConfig.for_model(**{name: few[name] for name in few if name != "quantization_config"})
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])._from_config(built, dtype=torch.bfloat16)
    kept = {name: each for name, each in model.state_dict().items() if name not in model.all_tied_weights_keys}
    template = {name: tuple(each.shape) for name, each in revert_weight_conversion(model, kept).items()}
    last = re.compile(rf"((?:.*\.)?layers\.){TEMPLATE - 1}(\..*)")
    placed = []
    for name, shape in template.items():
        found = last.fullmatch(name) if "visual" not in name else None
        indices = range(TEMPLATE - 1, text["num_hidden_layers"]) if found else (0,)
        placed += [(index, f"{found[1]}{index}{found[2]}" if found else name, shape) for index in indices]
    for _, place, shape in sorted(placed, key=lambda each: each[0]):
        yield from _packed(place, shape, str((config.get("quantization_config") or {}).get("quant_method")))


def _packed(name: str, shape: tuple[int, ...], method: str) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the tensors that stand for one of a float model, as DeepSeek and gpt-oss pack theirs."""
    if method == "fp8" and len(shape) == 2 and ".layers." in name and not name.endswith("mlp.gate.weight"):
        yield name, TensorInfo("F8_E4M3", shape)
        yield f"{name}_scale_inv", TensorInfo("F32", (-(-shape[0] // TILE), -(-shape[1] // TILE)))
    elif method == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        experts, inputs, outputs = shape
        yield f"{name}_blocks", TensorInfo("U8", (experts, outputs, inputs // 32, 16))
        yield f"{name}_scales", TensorInfo("U8", (experts, outputs, inputs // 32))
    else:
        yield name, TensorInfo("BF16", shape)


def _random(name: str, info: TensorInfo, drawn: torch.Generator) -> Tensor:
    place: dict[str, Any] = {"generator": drawn, "device": drawn.device}
    if info.dtype == "U8":
        low, high = (118, 122) if name.endswith("_scales") else (0, 256)
        return torch.randint(low, high, info.shape, dtype=torch.uint8, **place)
    if info.dtype == "F32":
        return torch.full(info.shape, 1 / 64, device=drawn.device)
    values = torch.randn(info.shape, dtype=torch.bfloat16, **place)
    if info.dtype == "F8_E4M3":
        return values.to(torch.float8_e4m3fn)
    wide = len(info.shape) > 1
    return (values * info.shape[-1] ** -0.5 if wide else 1 + values / 16).to(TORCH_DTYPES[info.dtype])


def _write_header(file: Path, tensors: Mapping[str, TensorInfo]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in tensors.items():
        header[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [end, end + info.size_bytes]}
        assert DTYPE_BITS[info.dtype] >= 8
        end += info.size_bytes
    text = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)


def _config(kind: str, blocks: int | None) -> dict[str, Any]:
    config = SHAPES[kind]
    if blocks is None:
        return config
    return _with_blocks(config, blocks) | ({"first_k_dense_replace": 1} if kind == "deepseek_v3" else {})


def _with_blocks(config: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], "num_hidden_layers": blocks}}
    return {**config, "num_hidden_layers": blocks}


def _beside(directory: Path, config: Mapping[str, Any]) -> Path:
    write_config(directory, config)
    save_tokenizer(directory)
    return directory
