"""Computes how many invocations a worker asks for at a time."""

from __future__ import annotations

# If an invocation takes less than this time, a worker prefetches invocations that together take this time. The time
# covers the round trip to the gateway, during which the worker would be idle.
PREFETCH_S = 0.002
# The largest number of prefetched invocations.
MAX_PREFETCH = 32


def window(slots: int, exec_s: float | None) -> int:
    """Return how many invocations a worker asks for: `slots`, and a number to prefetch if invocations are short.

    `exec_s` is the mean duration of recent invocations, or None if no invocation has ended yet.
    """
    # Do not prefetch longer invocations, which would wait at this worker while another worker may be free. If a short
    # invocation takes longer than usual, the invocations behind it go elsewhere (serving/late_workers.py).
    if exec_s is None or exec_s >= PREFETCH_S:
        return slots
    fits = min(MAX_PREFETCH, int(PREFETCH_S / max(exec_s, 1e-6)))
    # Round down to a power of two, so that the number seldom changes.
    return slots + (1 << fits.bit_length() - 1 if fits else 0)
