"""Which exporter makes the fastest graph of a model that is known to be equal; no torch is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from optkit.onnx.builder import ARCHITECTURES
from optkit.onnx.encoder_heads import architecture_of

OPSET = 21
"""Version of ONNX's operators that is written where no other is asked for."""
OPSETS = {"torch": range(18, 24), "optimum": range(14, 21)}
"""Exporter -> those that it can write and ONNX Runtime reads."""


def exporter_for(config: Mapping[str, Any]) -> Literal["genai", "torch"]:
    """Return `genai` for the decoders that it knows, whose attention it fuses; `torch` for all other models."""
    return "genai" if architecture_of(config) in ARCHITECTURES else "torch"
