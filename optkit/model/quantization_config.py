"""The types that every reader of config.json's `quantization_config` relies on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from optkit.common.files import shown

TEXTS = ("quant_method", "format", "version", "checkpoint_format", "bnb_4bit_quant_type")
NAMES = ("ignore", "modules_to_not_convert", "llm_int8_skip_modules", "targets")
"""Lists of the names of layers, or of patterns `re:...`."""
NUMBERS = ("bits", "num_bits", "w_bit", "group_size", "q_group_size")
"""Not 0; -1 stands for all."""
SCHEMES = ("weights", "input_activations", "output_activations", "kv_cache_scheme")
GROUPS = "config_groups"
BY_PATTERN = "dynamic"
"""Of GPTQ: pattern -> what differs there."""


def wrong_in_quantization(config: Mapping[str, Any], way: str = "quantization_config") -> Iterator[str]:
    """Yield what is wrong with a `quantization_config` or its group; null and missing keys pass."""
    for key, value in config.items():
        place = f"`{way}.{key}` in config.json is {shown(value)}, not"
        if value is None:
            continue
        if key in TEXTS and not isinstance(value, str):
            yield f"{place} text"
        elif key in NAMES and not (isinstance(value, list) and all(map(_is_name, value))):
            yield f"{place} a list of names and patterns"
        elif key in NUMBERS and (
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
