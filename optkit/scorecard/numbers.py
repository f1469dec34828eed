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
    """Return e.g. `20.52 ± 1.9`, `538.1 MB`, `123.4 ± 2.1 tok/s`, `80.1 [54.5, 100] %`."""
    scale, shown = _scale(value, unit)
    return " ".join(filter(None, (significant(value / scale, 4), interval_text(value, unit, interval), shown)))


def interval_text(value: float, unit: str, interval: tuple[float, float] | None) -> str:
    """Return half of an interval as `± 1.9`, and both ends if it is cut off at 0 or at 100%: half of
    what is left says nothing. It has no unit, and is empty without an interval.
    """
    if interval is None:
        return ""
    (low, high), (scale, _) = interval, _scale(value, unit)
    if low < high and (low == 0 or (unit == "fraction" and high == 1)):
        return f"[{significant(low / scale, 3)}, {significant(high / scale, 3)}]"
    return f"± {significant((high - low) / 2 / scale, 2)}"


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
