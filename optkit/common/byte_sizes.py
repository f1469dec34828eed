"""Sizes of memory and disk as people write them: `20 GiB`, `512 MB`, `100000`."""

from __future__ import annotations

import re

UNITS: dict[str, int] = {"": 1, "b": 1} | {
    f"{prefix}{ending}": int(base**power)
    for power, prefix in enumerate("kmgt", start=1)
    for ending, base in (("b", 1000), ("ib", 1024))
}  # fmt: skip
LARGEST = 1e15
"""Bytes; what is written larger is a slip."""


def size_bytes(written: int | str) -> int:
    """Return the bytes of a size, e.g. `20 GiB`; raises ValueError if it is not above zero."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(written))
    if found is None or found[2].lower() not in UNITS:
        raise ValueError(f"'{written}' is no size: write 20 GiB, 500 MB or a number of bytes")
    size = float(found[1]) * UNITS[found[2].lower()]
    if not 0.5 < size <= LARGEST:
        raise ValueError(f"'{written}' is no size above zero and up to {size_text(LARGEST)}")
    return round(size)


def size_text(size: float) -> str:
    """Return e.g. `538 MB`; `0 B` for nothing."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= scale:
            return f"{size / scale:.{3 if size < 999.5 * scale else 4}g} {unit}"
    return f"{size:.0f} B"
