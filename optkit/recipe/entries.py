"""One item of `stages:` or `evals:`, spelled out.
`- sdpa` and `- attention: sdpa` are short for `- attention: {implementation: sdpa}`.
"""

from __future__ import annotations

import copy
from typing import Any

from optkit.recipe.registry import PRESETS, class_of, names_of


def spell_out(role: str, item: Any) -> Any:
    """Return the item as `{kind: {field: value}}`.
    An item that cannot be spelled out comes back as it is.
    """
    if isinstance(item, str):
        item = copy.deepcopy(PRESETS[item]) if role == "stage" and item in PRESETS else {item: None}
    if not isinstance(item, dict) or len(item) != 1:
        return item
    (kind, fields), *_ = item.items()
    if fields is None:
        return {kind: {}}
    if not isinstance(fields, dict) and kind in names_of(role):
        shorthand = getattr(class_of(role, kind), "shorthand", None)
        return {kind: {shorthand: fields}} if shorthand else item
    return item
