"""Sizes of memory and disk as people write them: `20 GiB`, `512 MB`, `100000`."""

from __future__ import annotations

import re

UNITS: dict[str, int] = {"": 1, "b": 1} | {
    f"{prefix}{ending}": int(base**power)
    for power, prefix in enumerate("kmgt", start=1)
    for ending, base in (("b", 1000), ("ib", 1024))
}  # fmt: skip
LEAST = 1000
"""What a number without a unit is at least: with fewer, the unit was forgotten."""
LARGEST = 1e15
"""Bytes; what is written larger is a slip."""
_SIZE = re.compile(r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE]\+?\d{1,2})?)\s*([A-Za-z]*)\s*", re.ASCII)


def size_bytes(written: float | str, *, least: float = 1) -> int:
    """Return the bytes of a size, e.g. `20 GiB` or `300e6`; raises ValueError if it is none, or below `least`."""
    found = _SIZE.fullmatch(str(written))
    if found and (unit := UNITS.get(found[2].lower())):
        size = float(found[1]) * unit
        if (least if found[2] else LEAST) <= size <= LARGEST:
            return round(size)
    raise ValueError(f"'{written}' is no size. Write 20 GiB, 500 MB, or a number of bytes from {LEAST} to {LARGEST:g}.")


def size_text(size: float) -> str:
    """Return e.g. `538 MB`; `0 B` for nothing."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= scale:
            return f"{size / scale:.{3 if size < 999.5 * scale else 4}g} {unit}"
    return f"{size:.0f} B"
