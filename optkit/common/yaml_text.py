"""A value as YAML text, as recipes are written."""

from __future__ import annotations

from io import StringIO


def yaml_text(value: object) -> str:
    """Return a value's YAML in block style, at most 120 columns wide."""
    from ruamel.yaml import YAML

    emitter = YAML()
    emitter.default_flow_style = False
    emitter.width = 120
    text = StringIO()
    emitter.dump(value, text)
    return text.getvalue()
