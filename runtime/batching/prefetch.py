"""Prefetch: how many invocations a worker asks for at a time. A pure function."""

from __future__ import annotations

# A worker with invocations shorter than the way to the gateway and back holds so many seconds of work.
PREFETCH_S = 0.002
MAX_PREFETCH = 32


def window(slots: int, exec_s: float | None) -> int:
    """Return how many invocations a worker asks for: what it can run and, for short ones, some in advance.

    `exec_s` is the recent duration of one invocation, None before the first. Prefetching pays only where the
    round trip is a large part of it: a longer invocation would wait here while another worker is free. The
    number prefetched is a power of two, so that jitter of the measurement does not cause a stream of window
    changes.
    """
    if exec_s is None or exec_s >= PREFETCH_S:
        return slots
    fits = min(MAX_PREFETCH, int(PREFETCH_S / max(exec_s, 1e-6)))
    return slots + (1 << fits.bit_length() - 1 if fits else 0)
