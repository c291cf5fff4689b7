"""The figures of a simulated run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .simulator import CallOutcome, Run


def figures(run: Run) -> dict[str, Any]:
    """Shares are of the calls, each caller's first; latencies of those that were answered in time, in seconds."""
    first = [attempt for attempt in run.attempts if attempt.tries == 1]
    outcomes = Counter(attempt.outcome for attempt in first)
    answered = [attempt.latency_s for attempt in run.attempts if attempt.outcome is CallOutcome.ON_TIME]
    told = [attempt.retry_after_s for attempt in run.attempts if attempt.retry_after_s is not None]
    span_s = run.span_s or 1.0
    return {
        "calls": len(first),
        **{outcome.value: outcomes[outcome] for outcome in CallOutcome},
        "on_time_share": outcomes[CallOutcome.ON_TIME] / len(first) if first else 1.0,
        "latency_p50_s": percentile(answered, 0.5),
        "latency_p99_s": percentile(answered, 0.99),
        "retry_after_p50_s": percentile(told, 0.5),
        "batch_mean": sum(run.sizes) / len(run.sizes) if run.sizes else 0.0,
        "batch_p95": percentile(run.sizes, 0.95),
        "per_second": len(answered) / span_s,
        "busy_share": run.busy_s / (span_s * run.slots),
    }


def percentile(values: Sequence[float], share: float) -> float | None:
    ascending = sorted(values)
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))] if ascending else None
