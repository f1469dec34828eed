"""The base of everything that a recipe, plan, artifact or scorecard is made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable record whose fields are exactly the keys of its YAML or JSON form."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def set_among(self, *names: str) -> list[str]:
        """Return those of some fields that are not as by default: a resolved recipe writes down all."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]


def canonical_json(value: Any) -> str:
    """Return the one JSON text of a value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def digest(value: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def replaced(value: Any, change: Callable[[Frozen], Any]) -> Any:
    """Return a value with each frozen part of it replaced by what `change` returns of it.
    The innermost is first.
    """
    if isinstance(value, Frozen):
        parts = {name: getattr(value, name) for name in type(value).model_fields}
        changed = {name: new for name, part in parts.items() if (new := replaced(part, change)) is not part}
        return change(value.model_copy(update=changed) if changed else value)
    if isinstance(value, tuple | list):
        made = [replaced(part, change) for part in value]
        same = all(new is part for new, part in zip(made, value, strict=True))
        return value if same else tuple(made) if isinstance(value, tuple) else made
    if isinstance(value, dict):
        return {key: replaced(part, change) for key, part in value.items()}
    return value


def described(value: Frozen) -> dict[str, Any]:
    """Return a record with its class as JSON values, for another process. The kind travels with it:
    the registry, which may have filled it in, is not asked there.
    """
    return {
        "class": f"{type(value).__module__}:{type(value).__qualname__}",
        "kind": getattr(value, "kind", None),
        "fields": value.model_dump(mode="json"),
    }


def restored(said: Mapping[str, Any]) -> Any:
    """Return what `described` described."""
    found = resolve_name(said["class"])
    if said["kind"] and "kind" not in vars(found):
        found.kind = said["kind"]
    return found.model_validate(said["fields"])
