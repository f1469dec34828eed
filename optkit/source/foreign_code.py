"""Code that files of a model name, and that opening it could therefore run.
The files are read, and nothing is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from optkit.common.files import object_if_any
from optkit.model.onnx_shape import GENAI_CONFIG

CONFIGS = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
"""The files in which transformers looks for `auto_map`, the classes that come with a model."""
LIBRARY = "custom_ops_library"
"""Key of genai_config.json by which ONNX Runtime GenAI loads a shared library."""
ATTENTION = ("attn_implementation", "_attn_implementation")


def classes_in(config: Mapping[str, Any]) -> list[str]:
    """Return the classes that a config's `auto_map` names, e.g. `modeling_mine.Mine`, sorted."""
    named = config.get("auto_map")
    values = named.values() if isinstance(named, Mapping) else [named]
    return sorted({str(name) for value in values for name in (value if isinstance(value, list) else [value]) if name})


def kernels_in(config: Any) -> list[str]:
    """Return the hub kernels, `owner/repository`, that a config.json asks for its attention."""
    found = {name for key, value in _pairs(config) if key in ATTENTION for name in _texts(value) if "/" in name}
    return sorted(found)


def libraries_in(config: Any) -> list[str]:
    """Return the shared libraries that a parsed genai_config.json would have loaded."""
    return sorted({name for key, value in _pairs(config) if key == LIBRARY for name in _texts(value)})


def classes_of(directory: Path) -> list[str]:
    """Return the classes that any file of a model directory names as its own code."""
    return sorted({name for file in CONFIGS for name in classes_in(object_if_any(directory / file))})


def loaded_unasked(directory: Path) -> list[str]:
    """Return, in words, the kernels and shared libraries that a directory has loaded.
    Those who open it load them even if they trust no code.
    """
    kernels = [f"the kernel {name} of the hub" for name in kernels_in(object_if_any(directory / "config.json"))]
    return kernels + [f"the library {name}" for name in libraries_in(object_if_any(directory / GENAI_CONFIG))]


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield key and value of every mapping inside."""
    for key, part in value.items() if isinstance(value, dict) else ():
        yield key, part
        yield from _pairs(part)
    for part in value if isinstance(value, list) else ():
        yield from _pairs(part)


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for part in value.values() for text in _texts(part)]
    return [value] if isinstance(value, str) else []
