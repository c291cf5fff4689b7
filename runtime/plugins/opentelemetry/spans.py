"""Makes the spans of invocations after their responses, from the times in the header Server-Timing.

The SDK's tracer takes 12 microseconds or more for a span, because it is made for spans that change while they run. The times
of these spans are known, so they are made as `ReadableSpan`s, and given to the SDK's batch processor.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from ...._version import __version__
from ....errors import PilotflameError
from ...calls.serving.invocation import Invocation
from ...ground.telemetry.invocation_end import GenerationEnd, InvocationEnd, TraceContext
from ...ground.telemetry.timeline import CONTEXT, COPY, FETCH, Timeline
from .attributes import NAME, TRIGGERS, generation_attributes, resource
from .sampling import TraceSampling, parent_of, span_of

LOG = logging.getLogger(__name__)
# The spans of an invocation are made this long after its end. Then the response has been sent, and the other invocations
# of its batch have ended, too.
DELAY_S = 0.25
# In one turn of the event loop, the spans of AT_ONCE invocations are made, which takes 5 ms. The next turn comes PAUSE_S later.
# While MOST_WAITING invocations wait for their spans, a further invocation gets no spans.
AT_ONCE, PAUSE_S, MOST_WAITING = 256, 0.02, 4096
SCOPE = InstrumentationScope(NAME, __version__)
SAMPLED, UNSET = TraceFlags(TraceFlags.SAMPLED), Status()

Attributes: TypeAlias = dict[str, AttributeValue]
BatchKey: TypeAlias = tuple[str, float, float]
"""A handler call for several invocations: their worker, when they were sent, and how long the call took."""


class Interval(NamedTuple):
    """A phase, or a transfer beside the phases. Times are in monotonic seconds."""

    name: str
    started_s: float
    ended_s: float


class InvocationSpans:
    """The spans of the sampled invocations of a gateway."""

    def __init__(self) -> None:
        self._sampling, self._out = TraceSampling(), SpanOutput()
        self._waiting: deque[tuple[float, InvocationEnd, TraceContext]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._dropped = 0

    def begin(self, _function: str, invocation: Invocation) -> None:
        """Decide if an invocation is sampled. If it is sampled, or if its caller has a trace, give the invocation a span,
        whose id its worker gets.
        """
        if invocation.traceparent:
            span = self._sampling.child(invocation.traceparent)
        else:
            span = next(self._sampling.roots)
        if span:
            known = TraceContext(invocation.traceparent, invocation.tracestate, span)
            invocation.mark_traced(span, known if span[-1] == "1" else None)

    def note_end(self, end: InvocationEnd, known: TraceContext) -> None:
        """Make the spans of a sampled invocation soon."""
        if len(self._waiting) == MOST_WAITING:
            self._dropped += 1
            return
        # Drop the input and the output, because they may be large and no span has them.
        self._waiting.append((time.monotonic(), end._replace(call=None, output=None), known))
        self._schedule()

    def note_generated(self, generation: GenerationEnd) -> None:
        """Make the span of an answer of a language model, which is a child of the invocation's span."""
        if (known := generation.trace) is None:
            return
        self._out.start_turn()
        times = Interval(
            f"generate {generation.function}", generation.received_s, generation.last_s or time.monotonic()
        )
        self._out.make(
            times,
            context_of(known),
            attributes=generation_attributes(generation),
            status=status_of(generation.error),
        )

    def finish(self) -> None:
        """Make the spans of all invocations that have ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._make([(end, known) for _, end, known in self._waiting])
        self._waiting.clear()

    def shutdown(self) -> None:
        """Send all spans to the collector. Blocks."""
        self._out.shutdown()

    def _schedule(self) -> None:
        if self._timer is None and self._waiting:
            due_s = self._waiting[0][0] + DELAY_S - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(PAUSE_S, due_s), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        # Include invocations that ended at least half of the delay ago, so that the next timer is not due sooner than half of the delay from now.
        self._make(self._take(time.monotonic() - DELAY_S / 2))
        if self._dropped:
            LOG.warning("%d sampled invocations have no spans, because too many ended at once", self._dropped)
            self._dropped = 0
        self._schedule()

    def _take(self, until_s: float) -> list[tuple[InvocationEnd, TraceContext]]:
        """Remove and return the invocations that ended by `until_s`, and the rest of their batches; about AT_ONCE at most."""
        taken, batches = list[tuple[InvocationEnd, TraceContext]](), set[BatchKey]()
        while self._waiting:
            noted_s, end, known = self._waiting[0]
            key = batch_key(end.timeline, end.worker)
            if (noted_s > until_s or len(taken) >= AT_ONCE) and key not in batches:
                break
            self._waiting.popleft()
            taken.append((end, known))
            if end.timeline.batch > 1:
                batches.add(key)
        return taken

    def _make(self, ended: Sequence[tuple[InvocationEnd, TraceContext]]) -> None:
        self._out.start_turn()
        contexts = [context_of(known) for _, known in ended]
        batches = self._make_batches([end for end, _ in ended], contexts)
        for (end, known), context in zip(ended, contexts, strict=True):
            timeline = end.timeline
            batch = batches.get(batch_key(timeline, end.worker))
            for one in (*phases(timeline), *transfers(timeline)):
                links = [Link(batch)] if one.name == "exec" and batch is not None else ()
                self._out.make(one, context, links=links)
            total = Interval(end.function, timeline.received_s, timeline.received_s + timeline.total_s)
            parent = span_of(parent_of(known.parent, known.state)) if known.parent else None
            self._out.make(
                total, parent, context, attributes_of(end), status=status_of(end.error),
                kind=SpanKind.SERVER if end.source == "http" else SpanKind.CONSUMER,
            )  # fmt: skip

    def _make_batches(
        self, ends: Sequence[InvocationEnd], contexts: Sequence[SpanContext]
    ) -> Mapping[BatchKey, SpanContext]:
        """Make a span, in a trace of its own, of each handler call for several invocations. Return the spans."""
        links, first = dict[BatchKey, list[Link]](), dict[BatchKey, InvocationEnd]()
        for end, context in zip(ends, contexts, strict=True):
            if end.timeline.batch > 1:
                key = batch_key(end.timeline, end.worker)
                links.setdefault(key, []).append(Link(context))
                first.setdefault(key, end)
        found = dict[BatchKey, SpanContext]()
        for key, end in first.items():
            ran = next((one for one in phases(end.timeline) if one.name == "exec"), None)
            if ran is not None:
                attributes = function_of(end) | {"pilotflame.batch.size": end.timeline.batch}
                times = ran._replace(name=f"batch {end.function}")
                found[key] = self._out.make(times, attributes=attributes, links=links[key])
        return found


class OneResource(Resource):
    """A resource whose hash is computed once. The exporter needs the hash for each span, and `Resource` computes it from its JSON each time."""

    def __init__(self, of: Resource) -> None:
        super().__init__(of.attributes, of.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class SpanOutput:
    """Makes spans, and gives them to a batch processor, which a thread of the SDK empties."""

    def __init__(self) -> None:
        self._resource, self._ids = OneResource(resource(NAME)), RandomIdGenerator()
        self._processor = BatchSpanProcessor(OTLPSpanExporter())
        self._offset_ns = 0

    def start_turn(self) -> None:
        """Measure the difference between Unix time and the monotonic clock. It converts the times of the next spans."""
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def make(
        self, times: Interval, parent: SpanContext | None = None, context: SpanContext | None = None,
        attributes: Attributes | None = None, links: Sequence[Link] = (), status: Status = UNSET,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> SpanContext:  # fmt: skip
        """Make a span, and return its context. Without `context`, the span gets new ids."""
        if parent is not None and not parent.is_valid:
            parent = None
        if context is None:
            trace_id = self._ids.generate_trace_id() if parent is None else parent.trace_id
            state = None if parent is None else parent.trace_state
            context = SpanContext(trace_id, self._ids.generate_span_id(), is_remote=False, trace_flags=SAMPLED, trace_state=state)  # fmt: skip
        self._processor.on_end(
            ReadableSpan(
                times.name, context, parent, self._resource, attributes, (), links, kind, status=status,
                start_time=self._ns(times.started_s), end_time=self._ns(times.ended_s), instrumentation_scope=SCOPE,
            )
        )  # fmt: skip
        return context

    def shutdown(self) -> None:
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def _ns(self, at_s: float) -> int:
        return int(at_s * 1e9) + self._offset_ns


def phases(timeline: Timeline) -> Iterator[Interval]:
    """Yield the phases of Server-Timing in their order, without phases that took no time."""
    start_s = timeline.received_s
    for name, seconds in timeline.phases().items():
        if seconds > 0:
            yield Interval(name, start_s, start_s + seconds)
        start_s += seconds


def transfers(timeline: Timeline) -> Iterator[Interval]:
    """Yield the transfers of a cold start (fetches, copies, preparations of copies), each cut to the time of the phases."""
    if (activation := timeline.activation) is None:
        return
    kinds = {FETCH: activation.fetches, CONTEXT: activation.contexts, COPY: activation.copies}
    for kind, found in kinds.items():
        for one in found:
            if beside := timeline.overlap(one):
                start_s = max(timeline.received_s, one.started_s)
                name = f"{kind}-{one.name}" if one.name else kind
                yield Interval(name, start_s, start_s + sum(beside.values()))


def batch_key(timeline: Timeline, worker: str) -> BatchKey:
    return worker, timeline.sent_s, timeline.exec_s


def context_of(known: TraceContext) -> SpanContext:
    """Return the context of an invocation's own span."""
    _, trace_id, span_id, _ = known.span.split("-")
    state = span_of(parent_of(known.parent, known.state)).trace_state if known.state else None
    return SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=SAMPLED, trace_state=state
    )


def function_of(end: InvocationEnd) -> Attributes:
    return {"faas.name": end.function, "faas.version": end.revision, "faas.instance": end.worker}


def attributes_of(end: InvocationEnd) -> Attributes:
    timeline, found = end.timeline, function_of(end)
    found |= {
        "faas.invocation_id": end.request_id, "faas.trigger": TRIGGERS[end.source],
        "faas.coldstart": timeline.cold,
    }  # fmt: skip
    if end.source == "http":
        found["http.response.status_code"] = end.code
    if timeline.batch > 1:
        found["pilotflame.batch.size"] = timeline.batch
    if end.error is not None:
        found["error.type"] = end.error.code
    return found


def status_of(error: PilotflameError | None) -> Status:
    """Return the status of a span. A server's span has no error if the request was at fault."""
    if error is None or error.status < 500:
        return UNSET
    return Status(StatusCode.ERROR, error.message)
