"""Checkpoints in the shapes of models that people ship: random weights, or files with holes in their place."""

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from optkit.model.checkpoint import TORCH_NAMES
from optkit.model.safetensors_file import read_places
from optkit.model.shape import DTYPE_BITS, TensorInfo
from optkit.model.writer import INDEX, SHARD_BYTES, write_config
from tests.support.tiny_models import save_tokenizer

TEMPLATE = 4
"""Blocks that are asked of transformers; those behind are like the last of them."""
DRAWN = 1 << 24
"""Random values of a kind."""
THREADS = 16
SMALL = {"hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 512, "vocab_size": 1024}
SMALL |= {"num_experts": 16, "n_routed_experts": 16, "num_local_experts": 16}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 4}
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
    "llama3_8b": {
        **HALF,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "vocab_size": 128256,
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


def write_random(kind: str, directory: Path, blocks: int | None = None, small: bool = False) -> Path:
    """Write a checkpoint of a shape with random weights, and a tokenizer of few tokens."""
    write_holes(kind, directory, blocks, small=small)
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(_fill, sorted(directory.glob("*.safetensors"))))
    return directory


def write_holes(
    kind: str, directory: Path, blocks: int | None = None, shard_bytes: int = SHARD_BYTES, small: bool = False
) -> Path:
    """Write a checkpoint of a shape with zeros in place of weights, which take no room on the disk.
    `small`: of the same architecture, with matrices of a few hundred rows.
    """
    config = config_of(kind, blocks, small)
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
    write_config(directory, config)
    save_tokenizer(directory)
    return directory


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


def _fill(file: Path) -> None:
    """Write random values in place of holes."""
    with file.open("r+b") as opened:
        for name, (info, begin) in read_places(file)[0].items():
            opened.seek(begin)
            inputs = info.shape[-1] if len(info.shape) > 1 else 0
            drawn = memoryview(_drawn(info.dtype, inputs, name.endswith("_scales")))
            first = zlib.crc32(name.encode()) % DRAWN * (len(drawn) // DRAWN)
            left = info.size_bytes
            while left:
                left -= opened.write(drawn[first : first + left])
                first = 0


@lru_cache
def _drawn(dtype: str, inputs: int, scales: bool) -> bytearray:
    """Return random values of a dtype: tensors hold a part of them each, again and again if they are larger."""
    drawn = torch.Generator().manual_seed(inputs)
    if dtype == "U8":
        low, high = (118, 122) if scales else (0, 256)
        found = torch.randint(low, high, (DRAWN,), dtype=torch.uint8, generator=drawn)
    elif dtype == "F32":
        found = torch.full((DRAWN,), 1 / 64)
    else:
        values = torch.randn(DRAWN, generator=drawn)
        if dtype != "F8_E4M3":
            values = values * inputs**-0.5 if inputs else 1 + values / 16
        found = values.to(getattr(torch, TORCH_NAMES[dtype]))
    return bytearray(found.view(torch.uint8).numpy())


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


def config_of(kind: str, blocks: int | None, small: bool = False) -> dict[str, Any]:
    """Return the config.json of a shape, with so many blocks."""
    config = _small(SHAPES[kind]) if small else SHAPES[kind]
    if blocks is None:
        return config
    return _with_blocks(config, blocks) | ({"first_k_dense_replace": 1} if kind == "deepseek_v3" else {})


def _small(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config whose sizes are SMALL where it has or inherits them."""
    parts = {name: _small(part) for name, part in config.items() if name.endswith("text_config")}
    if "vision_config" in config:
        parts["vision_config"] = {**config["vision_config"], "depth": 2, "out_hidden_size": SMALL["hidden_size"]}
    has = transformers.AutoConfig.for_model(config["model_type"]).to_dict()
    return {**config, **{name: size for name, size in SMALL.items() if name in has}, **parts}


def _with_blocks(config: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], "num_hidden_layers": blocks}}
    return {**config, "num_hidden_layers": blocks}
