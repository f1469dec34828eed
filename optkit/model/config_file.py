"""config.json: what optkit and transformers compute with is checked once, when the file is read.

A config that is damaged, or made to do harm, would end in any error, or in none for hours: 10^9
layers are built one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from sys import float_info
from typing import Any

from optkit.common.files import read_object, shown
from optkit.errors import SourceError
from optkit.model.shape import BLOCK_COUNTS
from optkit.model.text_config import first_number, text_config

AGAIN = "Take config.json from the model's source again"
LAYERS, WIDTH, VOCABULARY, LENGTH = 10_000, 1 << 24, 1 << 28, 1 << 31
SIZES = {
    "hidden_size": WIDTH, "n_embd": WIDTH, "d_model": WIDTH,
    "num_hidden_layers": LAYERS, "n_layer": LAYERS, "num_layers": LAYERS, "n_layers": LAYERS,
    "num_attention_heads": WIDTH, "n_head": WIDTH, "vocab_size": VOCABULARY,
    "attn_layer_period": LAYERS, "expert_layer_period": LAYERS, "decoder_sparse_step": LAYERS,
}  # fmt: skip
"""Whole numbers above 0 and below a bound that no model is near, if they are there."""
LISTED_SIZES = {
    "num_key_value_heads": WIDTH, "num_kv_heads": WIDTH, "num_heads": WIDTH, "n_heads": WIDTH,
    "intermediate_size": WIDTH, "ffn_dim": WIDTH, "ffn_hidden_size": WIDTH,
    "moe_intermediate_size": WIDTH,
    "num_experts": WIDTH, "num_local_experts": WIDTH, "n_routed_experts": WIDTH, "num_experts_per_tok": WIDTH,
}  # fmt: skip
"""The same, one for all layers or a list, or null."""
FROM_ZERO = (
    "intermediate_size", "moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts",
    "num_experts_per_tok",
)  # fmt: skip
"""Some models have none of these."""
ONE_SIZE = (
    "head_dim", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_inner",
    "d_kv", "d_ff",
)  # fmt: skip
"""One for all layers, or null; 0 is none too."""
POSITIONS = (
    "max_position_embeddings", "n_positions", "sliding_window", "original_max_position_embeddings",
    "max_source_positions", "max_target_positions", "attention_chunk_size",
)  # fmt: skip
NUMBERS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "factor", "partial_rotary_factor")
KINDS = ("layer_types", "layers_block_type", "block_types")
BLOCKS = ("cross_attention_layers", "mlp_only_layers", "attn_layer_indices")
NAMES = ("model_type", "dtype", "torch_dtype", "hybrid_override_pattern")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
PARTS = (
    "text_config", "vision_config", "audio_config", "quantization_config", "rope_scaling", "rope_parameters",
    "auto_map", "encoder",
)  # fmt: skip
"""Objects, if they are there and not null."""
NESTED = ("text_config", "rope_parameters", "rope_scaling", "full_attention", "sliding_attention")
BESIDE = "hf_quant_config.json"
OTHER_WEIGHTS = "transformers_weights"
HEAD_WIDTHS = ("head_dim", "kv_channels", "d_kv", "attention_head_size")
"""How keys end that say how wide a head is; without any, the heads divide the hidden size."""
TEXTS = ("quant_method", "format", "version", "checkpoint_format", "bnb_4bit_quant_type")
LAYER_NAMES = ("ignore", "modules_to_not_convert", "llm_int8_skip_modules", "targets")
"""Lists of the names of layers, or of patterns `re:...`."""
WIDTHS = ("bits", "num_bits", "w_bit", "group_size", "q_group_size")
"""Not 0; -1 stands for all."""
SCHEMES = ("weights", "input_activations", "output_activations", "kv_cache_scheme")
GROUPS = "config_groups"
BY_PATTERN = "dynamic"
"""Of GPTQ: pattern -> what differs there."""


def read_config(path: Path) -> dict[str, Any]:
    """Return a parsed config.json whose numbers can be computed with. Raises SourceError if it
    is damaged. What NVIDIA's ModelOpt did to weights may stand in a file beside it.
    """
    config = read_object(path, remedy=AGAIN)
    if config.get(OTHER_WEIGHTS) is not None:
        raise SourceError(
            f"`{OTHER_WEIGHTS}` names {shown(config[OTHER_WEIGHTS])}",
            where=str(path),
            why="transformers reads that file, and other programs model.safetensors",
            remedy="Name the file model.safetensors, and take the key out",
        )
    beside = path.with_name(BESIDE)
    if beside.is_file() and not config.get("quantization_config"):
        told = read_object(beside, remedy=f"Take {BESIDE} from the model's source again").get("quantization")
        if isinstance(told, Mapping) and told.get("quant_algo"):
            config["quantization_config"] = {"quant_method": "modelopt", **told}
    check_values(config, str(path))
    return config


def check_values(config: Mapping[str, Any], where: str) -> None:
    """Raise SourceError for a value of a config.json that no model can have, with its key."""
    for wrong in _wrong(config):
        raise SourceError(wrong, where=where, remedy=AGAIN)
    for key in NESTED:
        if isinstance(config.get(key), Mapping):
            check_values(config[key], f"{where}: {key}")


def _wrong(config: Mapping[str, Any]) -> Iterator[str]:
    for keys, fits, what in FORMS:
        yield from (
            f"`{key}` in config.json is {shown(config[key])}, not {what}" for key in keys if not fits(config.get(key))
        )
    for key, most in SIZES.items():
        if key in config and not _is_size(config[key], 1, most):
            yield _no_size(key, config[key], 1, most)
    for key, most in LISTED_SIZES.items():
        least = 0 if key in FROM_ZERO else 1
        if config.get(key) is not None and not all(_is_size(each, least, most) for each in _each(config[key])):
            yield _no_size(key, config[key], least, most)
    for key in POSITIONS:
        whole = type(config.get(key)) is float and config[key].is_integer()  # transformers writes Music Flamingo's so
        if config.get(key) is not None and not _is_size(int(config[key]) if whole else config[key], -1, LENGTH):
            yield _no_size(key, config[key], -1, LENGTH)
    yield from _wrong_heads(config)
    if isinstance(config.get("quantization_config"), Mapping):
        yield from wrong_in_quantization(config["quantization_config"])


def _wrong_heads(config: Mapping[str, Any]) -> Iterator[str]:
    hidden = config.get("hidden_size") or config.get("n_embd")
    heads = config.get("num_attention_heads") or config.get("n_head")
    shared = config.get("num_key_value_heads")
    if hidden and heads and hidden % heads and not any(key.endswith(HEAD_WIDTHS) and config[key] for key in config):
        yield f"{heads:,} heads do not divide the hidden size {hidden:,} in config.json"
    if heads and isinstance(shared, int) and heads % shared:
        yield f"{shared:,} heads of keys and values do not divide the {heads:,} heads in config.json"


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_size(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= float_info.max


def _are_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(each, str) for each in value))


def _are_blocks(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(_is_size(each, 0, LAYERS) for each in value))


def _are_tokens(value: Any) -> bool:
    return all(each is None or _is_size(each, -1, VOCABULARY) for each in _each(value))


FORMS: tuple[tuple[Collection[str], Callable[[Any], bool], str], ...] = (
    (PARTS, lambda value: isinstance(value, Mapping | None), "an object"),
    (("architectures", *KINDS), _are_names, "a list of names"),
    (BLOCKS, _are_blocks, "a list of numbers of blocks"),
    (ONE_SIZE, lambda value: value is None or _is_size(value, 0, WIDTH), "a whole number from 0 up"),
    (NUMBERS, lambda value: value is None or _is_number(value), "a number"),
    (
        ("rope_theta",),
        lambda value: value is None or all(map(_is_number, _each(value))),
        "a number, or one for each block",
    ),
    (NAMES, lambda value: isinstance(value, str | None), "a name"),
    (TOKENS, _are_tokens, "the number of a token"),
)
"""Keys, what their values must be, and how that is said."""


def _no_size(key: str, value: Any, least: int, most: int) -> str:
    kind = {-1: "a whole number", 0: "a whole number from 0 up", 1: "a whole number above 0"}[least]
    limit = f" of at most {most:,}" if type(value) is int and value > most else ""
    return f"`{key}` in config.json is {shown(value)}, not {kind}{limit}"


def check_against_tensors(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise SourceError if a config.json asks for what its tensors cannot be.
    It may ask for more layers or words than they have, or another width.
    """
    text = text_config(config)
    sizes = {size for shape in shapes.values() for size in shape}
    layers = first_number(text, BLOCK_COUNTS)
    words, width = text.get("vocab_size", 0), text.get("hidden_size") or text.get("n_embd")
    wrong = ""
    if layers > len(shapes):
        wrong = f"{layers:,} layers, and there are {len(shapes):,} tensors"
    elif words > max(sizes, default=0):
        wrong = f"{words:,} words, and no tensor has more than {max(sizes, default=0):,} rows"
    elif width and width not in sizes:
        wrong = f"a hidden size of {width:,}, which no tensor has"
    if wrong:
        raise SourceError(f"config.json asks for {wrong}", where=where, remedy=AGAIN)


def of_weights(quantization: Mapping[str, Any]) -> bool:
    """Say whether a `quantization_config` is of weights, and not of a KV cache alone."""
    return bool(quantization) and quantization.get(GROUPS) != {}


def wrong_in_quantization(config: Mapping[str, Any], way: str = "quantization_config") -> Iterator[str]:
    """Yield what is wrong with a `quantization_config` or its group; null and missing keys pass."""
    for key, value in config.items():
        place = f"`{way}.{key}` in config.json is {shown(value)}, not"
        if value is None:
            continue
        if key in TEXTS and not isinstance(value, str):
            yield f"{place} text"
        elif key in LAYER_NAMES and not (isinstance(value, list) and all(map(_is_name, value))):
            yield f"{place} a list of names and patterns"
        elif key in WIDTHS and (
            isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**31 or not value
        ):
            yield f"{place} a number other than 0"
        elif key in SCHEMES:
            if isinstance(value, Mapping):
                yield from wrong_in_quantization(value, f"{way}.{key}")
            else:
                yield f"{place} an object"
        elif key == GROUPS or (key == BY_PATTERN and isinstance(value, Mapping)):
            yield from _wrong_in_parts(value, f"{way}.{key}", patterns=key == BY_PATTERN)


def _wrong_in_parts(parts: Any, way: str, *, patterns: bool) -> Iterator[str]:
    if not isinstance(parts, Mapping) or not all(isinstance(part, Mapping) for part in parts.values()):
        yield f"`{way}` in config.json is {shown(parts)}, not an object of objects"
        return
    for name, part in parts.items():
        if patterns and not _is_pattern(name.removeprefix("-:").removeprefix("+:")):
            yield f"`{way}` in config.json has the pattern {shown(name)}, which is none"
        yield from wrong_in_quantization(part, f"{way}.{name}")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and (not value.startswith("re:") or _is_pattern(value[3:]))


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return True
