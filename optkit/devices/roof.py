"""What a device was measured to reach: rates of reading, copying and products."""

from __future__ import annotations

from optkit.common.frozen import Frozen

WIDE_SPREAD = 0.1
"""Spread of the repeats from which on something else was using the device."""


class Rate(Frozen):
    """Bytes or operations per second."""

    value: float
    """The median of the repeats."""
    low: float
    high: float
    """Their quartiles: half of the repeats lie between them."""
    repeats: int

    @property
    def spread(self) -> float:
        """How far the quartiles lie apart, as a fraction of the median."""
        return (self.high - self.low) / self.value


class Roof(Frozen):
    """What a device was measured to reach."""

    reading: Rate
    """Bytes per second of reading memory alone."""
    copying: Rate
    """Bytes per second of reading and writing, both counted."""
    products: dict[str, Rate]
    """Operations per second of dense matrix products for each dtype."""

    @property
    def unsteady(self) -> str:
        """What spread by more than `WIDE_SPREAD` while it was measured; empty if nothing did.
        For example `reading by 38%, int8 by 20%`.
        """
        everything = {"reading": self.reading, "copying": self.copying, **self.products}
        return ", ".join(
            f"{name} by {rate.spread:.0%}" for name, rate in everything.items() if rate.spread > WIDE_SPREAD
        )
