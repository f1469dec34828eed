"""Every format that a directory of weights can have.
It is a dict of strings, so that listing imports nothing.

A plug-in package adds its own with an entry point of the group `optkit.formats`.
"""

from __future__ import annotations

from functools import cache
from pkgutil import resolve_name
from typing import Any

from optkit.common.plug_ins import with_plug_ins

FORMATS = {
    "checkpoint": "optkit.model.formats.checkpoint:FloatCheckpoint",
    "quantized": "optkit.model.formats.checkpoint:QuantizedCheckpoint",
    "adapted": "optkit.model.formats.checkpoint:AdaptedCheckpoint",
    "onnx": "optkit.model.formats.onnx:OnnxModel",
    "gguf": "optkit.model.formats.gguf:GgufModel",
}
"""Kind -> `module:Class`. If the files of several formats lie in a directory, the first one counts."""


def format_targets() -> dict[str, str]:
    """Return kind -> `module:Class` of all formats, those of plug-ins last.
    Raises OptkitError for a name taken twice.
    """
    return {kind: origin.target for kind, origin in with_plug_ins("format", FORMATS).items()}


@cache
def resolve(target: str) -> Any:
    """Return what `module:name` names."""
    return resolve_name(target)


@cache
def instance(target: str) -> Any:
    """Return the one instance of the class that `module:Class` names."""
    return resolve(target)()
