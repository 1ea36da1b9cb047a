"""Numbers with the unit that suits their size."""

from __future__ import annotations

from collections.abc import Sequence

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Return a value in the largest unit in which it is 1 or more."""
    scale, unit = next((one for one in units if abs(value) >= one[0] * (1 - 1e-9)), units[-1])
    return f"{value / scale:.3g} {unit}"
