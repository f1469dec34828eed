"""config.json and genai_config.json of an ONNX directory against its graph.
Layers, heads, names, vocabulary and positions have to agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from optkit.model.task import Task, architecture_of, task_of
from optkit.onnx.directory import GENAI_CONFIG, OnnxDirectory, Port

CONFIG = "config.json"
ATTENTION = "GroupQueryAttention"
CACHE_NAMES = ("past_key_names", "past_value_names", "present_key_names", "present_value_names")
"""Fields of genai_config.json that hold a pattern with %d in place of the layer."""
OPTIONAL = ("attention_mask", "position_ids")
"""Inputs that GenAI fills in if the graph has them, named by genai_config.json or not."""
ROTARY_TABLE = 7
"""Which input of that attention is its table of cosines, [positions, half of a head]."""


def problems_of_config(found: OnnxDirectory) -> list[str]:
    """Return what in config.json does not fit the graph."""
    if not found.config:
        return [f"there is no {CONFIG}, which tokenizers and other programs ask for"]
    config = _mapping(found.config, "text_config") or found.config
    cache = [layer.past for layer in found.cache]
    labels = task_of(config) is Task.CLASSIFICATION and not architecture_of(config).endswith("ForMaskedLM")
    stated = {
        "num_hidden_layers": None if config.get("is_encoder_decoder") else len(cache) // 2 or None,
        "num_key_value_heads": _size(cache, 1),
        "vocab_size": None if labels else _logits_width(found),
    }
    problems = [
        f"{CONFIG} says {name} {config[name]}, and the graph has {size}"
        for name, size in stated.items()
        if size and isinstance(config.get(name), int) and config[name] != size
    ]
    if labels and (named := len(config.get("id2label") or ())) and named != _logits_width(found):
        problems.append(f"{CONFIG} names {named} labels, and the graph gives {_logits_width(found)}")
    if "quantization_config" in found.config:
        problems.append(f"{CONFIG} has a quantization_config, and other programs would look for packed safetensors")
    return problems


def problems_of_genai(found: OnnxDirectory) -> list[str]:
    """Return what in genai_config.json does not fit the graph or the directory; it has to be there."""
    model = _mapping(found.genai_config, "model")
    decoder = _mapping(model, "decoder")
    if not decoder:
        return [f"{GENAI_CONFIG} has no model.decoder"]
    return [*_wrong_names(found, decoder), *_wrong_sizes(found, model, decoder), *_wrong_lengths(found, model)]


def _wrong_names(found: OnnxDirectory, decoder: Mapping[str, Any]) -> Iterator[str]:
    """Every name that it gives is in the graph, and every input of the graph is given."""
    if decoder.get("filename") != found.path.name:
        yield f"{GENAI_CONFIG} names the file {decoder.get('filename')}, and the model is {found.path.name}"
    layers = len(found.cache) // 2
    if decoder.get("num_hidden_layers") != layers:
        yield (
            f"{GENAI_CONFIG} says num_hidden_layers {decoder.get('num_hidden_layers')}, and the graph "
            f"has the KV cache of {layers}"
        )
        return
    for side, ports in (("input", found.graph.inputs), ("output", found.graph.outputs)):
        named = dict(_names(_mapping(decoder, f"{side}s"), layers))
        for name, field in named.items():
            if name not in ports and field not in OPTIONAL:
                yield f"{GENAI_CONFIG} names the {side} {name} ({field}), which the graph does not have"
        if side == "input":
            missing = [name for name in ports if name not in named and name not in OPTIONAL]
            yield from (f"the graph asks for the input {name}, which {GENAI_CONFIG} does not name" for name in missing)


def _names(fields: Mapping[str, Any], layers: int) -> Iterator[tuple[str, str]]:
    for field, name in fields.items():
        if field in CACHE_NAMES:
            yield from ((str(name).replace("%d", str(layer)), field) for layer in range(layers))
        else:
            yield str(name), field


def _wrong_sizes(found: OnnxDirectory, model: Mapping[str, Any], decoder: Mapping[str, Any]) -> Iterator[str]:
    cache = [layer.past for layer in found.cache]
    heads = next((node.attributes.get("num_heads") for node in found.graph.nodes if node.kind == ATTENTION), None)
    stated = {
        "num_key_value_heads": (decoder, _size(cache, 1)),
        "head_size": (decoder, _size(cache, 3)),
        "num_attention_heads": (decoder, heads),
        "vocab_size": (model, _logits_width(found)),
    }
    for name, (place, size) in stated.items():
        if size and place.get(name) != size:
            yield f"{GENAI_CONFIG} says {name} {place.get(name)}, and the graph has {size}"


def _wrong_lengths(found: OnnxDirectory, model: Mapping[str, Any]) -> Iterator[str]:
    attention = [node for node in found.graph.nodes if node.kind == ATTENTION and len(node.inputs) > ROTARY_TABLE]
    tables = [found.graph.initializers.get(node.inputs[ROTARY_TABLE]) for node in attention]
    positions = min((table.shape[0] for table in tables if table and table.shape), default=None)
    length, longest = model.get("context_length"), _mapping(found.genai_config, "search").get("max_length")
    if positions and isinstance(length, int) and length > positions:
        yield f"{GENAI_CONFIG} says context_length {length}, and the graph has a rotary table of {positions} positions"
    if isinstance(length, int) and isinstance(longest, int) and longest > length:
        yield f"{GENAI_CONFIG} says max_length {longest}, more than its context_length {length}"


def _mapping(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object below a key; empty if there is none, or something else."""
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def _size(ports: list[Port], axis: int) -> int | None:
    """Return the size that all ports have there; None if there are none or they disagree."""
    sizes = {port.shape[axis] for port in ports}
    size = sizes.pop() if len(sizes) == 1 else None
    return size if isinstance(size, int) else None


def _logits_width(found: OnnxDirectory) -> int | None:
    last = found.graph.outputs["logits"].shape[-1] if "logits" in found.graph.outputs else None
    return last if isinstance(last, int) else None
