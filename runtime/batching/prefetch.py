"""Computes how many invocations a worker asks for at a time."""

from __future__ import annotations

# If invocations take less than this, a worker prefetches as many as take this long together. It covers the
# round trip to the gateway, during which the worker would be idle.
PREFETCH_S = 0.002
# The largest number of prefetched invocations.
MAX_PREFETCH = 32


def window(slots: int, exec_s: float | None) -> int:
    """Return how many invocations a worker asks for: `slots`, plus some to prefetch if they are short.

    `exec_s` is the mean duration of recent invocations, None before the first.
    """
    # Longer invocations would wait at this worker while another one may be free.
    if exec_s is None or exec_s >= PREFETCH_S:
        return slots
    fits = min(MAX_PREFETCH, int(PREFETCH_S / max(exec_s, 1e-6)))
    # A power of two, so that the number seldom changes.
    return slots + (1 << fits.bit_length() - 1 if fits else 0)
