"""The part of config.json that is about the language model, which multi-modal models nest. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json that is about the language model."""
    return config.get("text_config") or config


def with_text_config(
    config: Mapping[str, Any], change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Return config.json with the part that is about the language model changed."""
    if config.get("text_config"):
        return {**config, "text_config": change(config["text_config"])}
    return change(config)
