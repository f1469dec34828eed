"""The engines that `optkit verify` can ask.
It is a dict of strings, so that listing imports nothing.

A plug-in package adds its own with an entry point of the group `optkit.engines`.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from optkit.common.plug_ins import with_plug_ins

if TYPE_CHECKING:
    from optkit.verification.engines import Engine

ENGINES = {
    "transformers": "optkit.verification.engines:TRANSFORMERS",
    "vllm": "optkit.verification.engines:VLLM",
    "onnxruntime": "optkit.verification.engines:ONNXRUNTIME",
    "onnxruntime-genai": "optkit.verification.engines:ONNXRUNTIME_GENAI",
    "llama.cpp": "optkit.verification.engines:LLAMA_CPP",
    "optimum": "optkit.verification.engines:OPTIMUM",
}
"""Name -> `module:name` of an `optkit.verification.engines.Engine`, in the order of reports."""


def engine_names() -> tuple[str, ...]:
    """Return the names of all engines, in the order of reports; imports none of them."""
    return tuple(with_plug_ins("engine", ENGINES))


def engine_of(name: str) -> Engine:
    """Return the engine of a name."""
    found: Engine = resolve_name(with_plug_ins("engine", ENGINES)[name].target)
    return found
