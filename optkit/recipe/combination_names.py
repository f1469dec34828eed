"""The names of a matrix's combinations: short, unique, and valid for a directory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from optkit.common.frozen import digest

LONGEST = 80
"""Letters of a combination's name."""


def axis_labels(path: str, values: Sequence[Any], others: Sequence[str]) -> tuple[str, ...]:
    """Return a word for each value of an axis, e.g. `bits4`; that of a whole stage is its kind.
    `others` are the paths of the other axes, from which the word tells this one apart.
    """
    names = path.split(".")
    if all(_is_listed(value) for value in values):
        words = [_kinds(value) for value in values]
        if len(set(words)) < len(words):
            words = [_with_fields(word, value) for word, value in zip(words, values, strict=True)]
    else:
        alike = any(other.split(".")[-1] == names[-1] for other in others)
        word = _slug(".".join(name for name in names if name != "*") if alike else names[-1])
        words = [f"{word}{_slug(value)}" for value in values]
    return tuple(word if words.count(word) == 1 else f"{word}-{index}" for index, word in enumerate(words, start=1))


def combination_name(labels: Sequence[str], assignment: Mapping[str, Any]) -> str:
    """Return the name of a combination whose axes have these labels."""
    name = "-".join(labels).strip("-.") or "combination"
    return shortened(name if name[0].isalnum() else f"c{name}", assignment, LONGEST)


def shortened(name: str, meant: Any, longest: int) -> str:
    """Return a name that is short enough; the digest of what is meant keeps it unique."""
    return name if len(name) <= longest else f"{name[: longest - 9]}-{digest(meant)[:8]}"


def _is_listed(value: Any) -> bool:
    """Say whether a value is a stage or eval as a list holds it, or several."""
    if isinstance(value, list):
        return all(_is_listed(each) for each in value)
    return (isinstance(value, str) and value.isidentifier()) or (isinstance(value, Mapping) and len(value) == 1)


def _kinds(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(_kinds(each) for each in value) or "none"
    return _slug(value if isinstance(value, str) else next(iter(value)))


def _with_fields(word: str, value: Any) -> str:
    """Return the word with the fields of a stage that are numbers or text."""
    fields = next(iter(value.values())) if isinstance(value, Mapping) else None
    plain = fields.items() if isinstance(fields, Mapping) else ()
    said = [f"{name}{_slug(each)}" for name, each in plain if not isinstance(each, Mapping | list)]
    return "-".join([word, *said])


def _slug(value: Any) -> str:
    """Return a value as a part of a name."""
    if value is None:
        return "none"
    if isinstance(value, Mapping | list):
        return digest(value)[:6]
    text = str(value).lower() if isinstance(value, bool) else re.sub(r"^-(?=\d)", "minus", str(value))
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")
