"""genai_config.json for decoders of torch or optimum, so that ONNX Runtime GenAI runs them too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optkit.common.files import read_object
from optkit.model.onnx_file import MODEL
from optkit.model.onnx_shape import GENAI_CONFIG
from optkit.model.text_config import text_config
from optkit.onnx.directory import OnnxDirectory

INPUTS = ("input_ids", "attention_mask", "position_ids")
"""What GenAI fills in, besides the KV cache."""
PAST = {f"past_{kind}_names": f"past_key_values.%d.{kind}" for kind in ("key", "value")}
PRESENT = {f"present_{kind}_names": f"present.%d.{kind}" for kind in ("key", "value")}


def write_genai_config(directory: Path) -> str:
    """Write genai_config.json beside a decoder with a KV cache.
    Return why GenAI does not run such a graph, empty if it does.

    The kind of model is `decoder`, GenAI's for any that takes tokens, a mask and a cache of one
    shape in all layers.
    """
    found = OnnxDirectory(directory)
    if reason := _why_not(found):
        return reason
    first = found.cache[0].past
    text = text_config(found.config)
    heads, size = first.shape[1], first.shape[3]
    attention = int(text.get("num_attention_heads") or text.get("n_head") or heads)
    ends = _ends(directory, text)
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": MODEL,
        "head_size": size,
        "hidden_size": int(text.get("hidden_size") or text.get("n_embd") or attention * int(size)),
        "inputs": {name: name for name in INPUTS if name in found.graph.inputs} | PAST,
        "outputs": {"logits": "logits"} | PRESENT,
        "num_attention_heads": attention,
        "num_hidden_layers": len(found.cache) // 2,
        "num_key_value_heads": heads,
    }
    pad = text.get("pad_token_id")
    model = {
        "bos_token_id": text.get("bos_token_id") or 0,
        "context_length": found.positions,
        "decoder": decoder,
        "eos_token_id": ends,
        "pad_token_id": pad if isinstance(pad, int) and pad >= 0 else (ends or [0])[0],
        "type": "decoder",
        "vocab_size": found.vocabulary,
    }
    search = {"do_sample": False, "max_length": found.positions, "num_beams": 1, "past_present_share_buffer": False}
    (directory / GENAI_CONFIG).write_text(
        json.dumps({"model": model, "search": search}, indent=2) + "\n", encoding="utf-8"
    )
    return ""


def _why_not(found: OnnxDirectory) -> str:
    layers = len(found.cache) // 2
    expected = {pattern % layer for pattern in PAST.values() for layer in range(layers)}
    if not layers:
        return "the graph has no KV cache"
    if odd := sorted(set(found.graph.inputs) - expected - set(INPUTS)):
        return f"it has nothing for the input {odd[0]}"
    if len({layer.past.shape[1::2] for layer in found.cache}) > 1:
        return "its KV cache has one shape in all layers, and that of the graph has several"
    return (
        ""
        if found.positions and found.vocabulary
        else "config.json does not say for how many tokens the model was built"
    )


def _ends(directory: Path, text: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text."""
    path = directory / "generation_config.json"
    named = (read_object(path) if path.is_file() else {}).get("eos_token_id", text.get("eos_token_id"))
    return [int(each) for each in (named if isinstance(named, list) else [named]) if isinstance(each, int)]
