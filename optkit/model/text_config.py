"""The part of config.json that is about the language model, which multi-modal models nest. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from optkit.model.config_defaults import defaults_of


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json that is about the language model.

    If it is nested, it is often as short as transformers' defaults allow, which are filled in.
    """
    nested = config.get("text_config")
    return {**defaults_of(str(nested.get("model_type") or "")), **nested} if nested else config


def text_type(config: Mapping[str, Any]) -> str:
    """Return the `model_type` that this part says; empty if it says none."""
    return str(text_config(config).get("model_type") or "")


def first_number(config: Mapping[str, Any], keys: Iterable[str]) -> int:
    """Return the first of these numbers that the language model's part says; 0 if it says none.
    Of numbers of each block it is the largest.
    """
    text = text_config(config)
    found = next((text[key] for key in keys if text.get(key)), 0)
    return int(max(found) if isinstance(found, list) else found)


def with_text_config(
    config: Mapping[str, Any], change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Return config.json with the part that is about the language model changed. A nested one's defaults are
    written out: what follows from them before a change does not after it.
    """
    text = change(text_config(config))
    return {**config, "text_config": text} if config.get("text_config") else text
