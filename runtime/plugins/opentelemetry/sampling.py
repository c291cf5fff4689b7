"""Decides which invocations are traced, and makes the ids of their spans.

The SDK takes 3 microseconds to decide about a request, and 10 more to read the trace of a caller, which is much for a
short call. So this module asks the sampler at the start only. Later it compares trace ids with a number. For requests
without a trace, it draws how many come before the next sampled request. The requests before it need no ids.
"""

from __future__ import annotations

import math
import os
import secrets
import sys
from collections.abc import Iterator

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import Decision, Sampler
from opentelemetry.trace import SpanContext, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

W3C = TraceContextTextMapPropagator()
NO_PARENT = Context()
SPAN_BYTES = 8
# Samplers decide by the lower half of a trace id.
HALF_BITS = 64
# The length of a `traceparent` of version 00. Later versions may be longer.
LENGTH = 55
NO_TRACE, NO_SPAN, PARENT = "0" * 32, "0" * 16, "0" * 15 + "1"


class TraceSampling:
    """Makes the `traceparent` of the spans of invocations. It ends with 01 if the invocation is sampled."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        """Without `sampler`, OpenTelemetry's environment variables choose the sampler."""
        self._sampler = sampler or TracerProvider(shutdown_on_exit=False).sampler
        self.roots = _roots(self._bound(""))
        """For each request without a parent, the `traceparent` of its span; "" if it is not sampled."""
        # The bounds for requests with a parent, by whether the caller has sampled the parent.
        self._bounds = {sampled: self._bound(f"-{PARENT}-{sampled:02x}") for sampled in (False, True)}

    def child(self, traceparent: str) -> str:
        """Return the `traceparent` of a span whose parent is a caller's span. If the argument is invalid, return the next
        of `roots`.

        `traceparent` matches `timeline.TRACEPARENT`.
        """
        version, trace_id, span_id = traceparent[:2], traceparent[3:35], traceparent[36:52]
        too_long = version == "00" and len(traceparent) > LENGTH
        if version == "ff" or too_long or trace_id == NO_TRACE or span_id == NO_SPAN:
            return next(self.roots)
        by_caller = bool(int(traceparent[53:55], 16) & 1)
        sampled = int(trace_id[16:], 16) < self._bounds[by_caller]
        return f"00-{trace_id}-{os.urandom(SPAN_BYTES).hex()}-{sampled:02x}"

    def _bound(self, parent: str) -> int:
        """Return the number below which the lower half of a trace id must be, so that a span is sampled.

        `parent` is the end of the `traceparent` of the span's parent, or "". All standard samplers sample the ids below a
        number, so a binary search finds this number.
        """
        low, high = 0, 1 << HALF_BITS
        while low < high:
            middle = (low + high) // 2
            # The upper half only makes the id a valid one.
            trace_id = 1 << HALF_BITS | middle
            context = parent_of(f"00-{trace_id:032x}{parent}" if parent else "", "")
            found = self._sampler.should_sample(context, trace_id, "invoke", SpanKind.SERVER)
            if found.decision is Decision.RECORD_AND_SAMPLE:
                low = middle + 1
            else:
                high = middle
        return low


def _roots(bound: int) -> Iterator[str]:
    share = bound / (1 << HALF_BITS)
    while True:
        for _ in range(_unsampled(share)):
            yield ""
        ids = os.urandom(16 + SPAN_BYTES).hex()
        yield f"00-{ids[:16]}{secrets.randbelow(bound):016x}-{ids[32:]}-01"


def _unsampled(share: float) -> int:
    """Return how many requests come before the next sampled one: a random number with the geometric distribution."""
    if share <= 0.0:
        return sys.maxsize
    if share >= 1.0:
        return 0
    return int(
        min(math.log1p(-secrets.randbelow(1 << 53) / (1 << 53)) / math.log1p(-share), sys.maxsize // 2)
    )


def parent_of(traceparent: str, tracestate: str) -> Context:
    """Return a context with the span of a `traceparent`; without a span if it is empty or invalid."""
    return W3C.extract({"traceparent": traceparent, "tracestate": tracestate}, NO_PARENT)


def span_of(context: Context) -> SpanContext:
    """Return the span of a context. It is invalid if there is no span."""
    return trace.get_current_span(context).get_span_context()
