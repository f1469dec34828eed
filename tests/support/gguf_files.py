"""GGUF files as llama.cpp's converter writes them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from optkit.model.checkpoint import Checkpoint
from optkit.source.gguf_llama import LAYOUTS, tensor_name

ALL = sorted({part for layout in LAYOUTS.values() for part in layout.block})


def save_gguf(model: Path, file: Path, architecture: str, quantization: str = "F32", **changes: object) -> Path:
    """Write a checkpoint as llama.cpp's converter does: q and k of `llama` reordered for its rotary
    embedding, tokens and merges beside.
    """
    import gguf
    import numpy as np

    checkpoint, metadata = (
        Checkpoint(model),
        json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"],
    )
    config = checkpoint.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in sorted(metadata["vocab"].items(), key=lambda item: item[1])])
    writer.add_token_types([3] + [1] * (len(metadata["vocab"]) - 1))
    writer.add_token_merges([" ".join(pair) for pair in metadata["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages }}")
    for key, value in changes.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    names = {
        tensor_name(f"blk.{index}.{part}", LAYOUTS[architecture]): f"blk.{index}.{part}"
        for index in range(9)
        for part in ALL
    }
    names |= {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    for name in checkpoint.tensors:
        weights = checkpoint.read(name).float().numpy()
        if architecture == "llama" and (found := re.search(r"\.(q|k)_proj\.", name)):
            heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
            halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
            weights = halves.swapaxes(1, 2).reshape(weights.shape)
        kind = gguf.GGMLQuantizationType[quantization if weights.ndim == 2 else "F32"]
        weights = np.ascontiguousarray(weights)
        writer.add_tensor(names[name], gguf.quants.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def save_by_names(
    model: Path, file: Path, architecture: str, words: Mapping[str, str], norms: float = 0.0, **told: Any
) -> Path:
    """Write a checkpoint as llama.cpp's converter does, by gguf's own table of names. `words` are key of
    the metadata -> field of the config, `norms` is added to the weights of norms, `told` is more metadata.
    """
    import gguf
    import numpy as np

    checkpoint, config = Checkpoint(model), AutoConfig.from_pretrained(model)
    vocabulary = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    writer = gguf.GGUFWriter(file, architecture)
    values = {key: getattr(config, word) for key, word in words.items()}
    rope = getattr(config, "rope_parameters", None) or {}
    if theta := rope.get("full_attention", rope).get("rope_theta"):
        values["rope.freq_base"] = float(theta)
    for key, value in (values | {key.replace("__", "."): value for key, value in told.items()}).items():
        kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(f"{architecture}.{key}", value, kind)
    space = "▁" if architecture.startswith("gemma") else "Ġ"
    tokens = [token.replace("Ġ", space) for token, _ in sorted(vocabulary["vocab"].items(), key=lambda item: item[1])]
    tokens[1] = "<unk>"
    tokens += [f"<{index}>" for index in range(len(tokens), config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(0)
    known = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(known, 9)
    experts: dict[str, list[Any]] = {}
    for name in sorted(checkpoint.tensors, key=lambda name: [*map(int, re.findall(r"\d+", name))]):
        weights = checkpoint.read(name).float().numpy() + (norms if name.endswith("norm.weight") else 0)
        if found := re.search(r"layers\.(\d+)\..*\.experts\.\d+\.(\w+)_proj", name):
            experts.setdefault(f"blk.{found[1]}.ffn_{found[2]}_exps.weight", []).append(weights)
        else:
            place = names.get_name(name, (".weight", ".bias")) or f"{names.get_name(name)}.weight"
            writer.add_tensor(place, np.ascontiguousarray(_converted(name, weights)))
    for name, each in experts.items():
        writer.add_tensor(name, np.stack(each))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _converted(name: str, weights: Any) -> Any:
    return weights.squeeze() if "shared_expert_gate" in name else weights
