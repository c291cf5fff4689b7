"""Percentiles of a list of figures, without interpolation, and the median."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(figures: Sequence[float], share: float) -> float:
    """Return the nearest rank: the smallest figure that at least `share` (0 to 1) of the figures do not
    exceed.
    """
    if not figures:
        return math.nan
    ordered = sorted(figures)
    return float(ordered[max(0, math.ceil(share * len(ordered)) - 1)])


def median(figures: Sequence[float]) -> float:
    """Return the middle figure, or the mean of the middle two if the number of figures is even."""
    if not figures:
        return math.nan
    ordered = sorted(figures)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[middle])
    return (ordered[middle - 1] + ordered[middle]) / 2
