"""A line through measured times, which follows the latest ones."""

from __future__ import annotations


class TimeLine:
    """A time for each pass and a time for each item in it, by least squares with weights that decay."""

    def __init__(self, decay: float) -> None:
        """The weight of a measurement is multiplied by `decay` with each later one."""
        self._decay = decay
        # The weighted sums of 1, n, t, n² and n t, for passes of n items that took t seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def note(self, items: int, taken_s: float) -> None:
        latest = (1.0, items, taken_s, items * items, items * taken_s)
        self._sums = tuple(  # type: ignore[assignment]
            self._decay * one + new for one, new in zip(self._sums, latest, strict=True)
        )

    def fit(self, *, least: float = 0.0, level: float = 0.0) -> tuple[float, float]:
        """Return the seconds of a pass, and of each item; (0, 0) before the first measurement.

        The time of an item is at least `least` times the mean time of an item. Passes of one size determine no line: then the
        time of an item is `level` times this mean.
        """
        count, n, t, nn, nt = self._sums
        if not n:
            return 0.0, 0.0
        spread = count * nn - n * n
        item_s = (count * nt - n * t) / spread if spread > 1e-3 * nn * count else level * t / n
        item_s = min(max(item_s, least * t / n), t / n)
        return max(0.0, (t - item_s * n) / count), item_s
