"""Numbers as people read them: four digits, a unit that fits, the 95% interval's half width."""

from __future__ import annotations

import math

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "bytes": _BYTES,
    "bytes/s": tuple((scale, f"{unit}/s") for scale, unit in _BYTES),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "tokens/s": ((1.0, "tok/s"),),
    "fraction": ((1e-2, "%"),),
    "sequences/s": ((1.0, "seq/s"),),
    "perplexity": ((1.0, ""),),
    "cosine": ((1.0, ""),),
    "correlation": ((1.0, ""),),
    "percent": ((1.0, "%"),),
    "probability": ((1.0, ""),),
    "score": ((1.0, ""),),
}
"""Unit of a metric -> the units that it is shown in, largest first."""


def format_value(value: float, unit: str, interval: tuple[float, float] | None = None) -> str:
    """Return e.g. `20.52 ± 1.9`, `538.1 MB`, `4.213 ms ± 0.020`, `123.4 ± 2.1 tok/s`."""
    scale, shown = _scale(value, unit)
    text = significant(value / scale, 4)
    if interval is not None:
        text += f" ± {significant((interval[1] - interval[0]) / 2 / scale, 2)}"
    return f"{text} {shown}".rstrip()


def format_ratio(ratio: float, interval: tuple[float, float] | None = None) -> str:
    """Return e.g. `1.172x [1.150, 1.195]`."""
    text = f"{significant(ratio, 4)}x"
    return f"{text} [{significant(interval[0], 4)}, {significant(interval[1], 4)}]" if interval else text


def significant(value: float, digits: int) -> str:
    """Return a number with so many significant digits, never fewer than its whole part.
    It has an exponent below 1e-4 and above 1e9.
    """
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    magnitude = math.floor(math.log10(abs(value)))
    rounded = round(value, digits - 1 - magnitude)
    magnitude = math.floor(math.log10(abs(rounded)))
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def _scale(value: float, unit: str) -> tuple[float, str]:
    scales = SCALES.get(unit, ((1.0, unit),))
    return next((each for each in scales if abs(value) >= each[0]), scales[-1])
