"""Spans of invocations: what is kept in memory until the spans are made, and their parents, links and attributes."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from pilotflame.errors import HandlerFailed, InputInvalid, PilotflameError
from pilotflame.runtime.ground.telemetry.invocation_end import InvocationEnd, TraceContext
from pilotflame.runtime.ground.telemetry.timeline import Timeline
from pilotflame.runtime.plugins.opentelemetry import spans as module
from pilotflame.runtime.plugins.opentelemetry.spans import InvocationSpans


class EndedCall:
    body = b"x" * 1000
    content_type = ""


@pytest.mark.asyncio
async def test_inputs_are_not_kept_until_the_spans_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    spans, call = InvocationSpans(), EndedCall()
    gone = weakref.ref(call)
    trace = TraceContext("", "", f"00-{'1' * 32}-{'2' * 16}-01")
    spans.note_end(InvocationEnd("f", "r1", "q", "http", Timeline(0.0), call=call), trace)
    del call
    assert gone() is None
    spans.shutdown()


class Processor:
    """Keeps the spans that an exporter would send."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Processor:
    found = Processor()
    monkeypatch.setattr(module, "OTLPSpanExporter", lambda: None)
    monkeypatch.setattr(module, "BatchSpanProcessor", lambda _exporter: found)
    return found


def context(parent: str = "", span: str = "2") -> TraceContext:
    return TraceContext(
        f"00-{'1' * 32}-{parent * 16}-01" if parent else "", "shop=1", f"00-{'1' * 32}-{span * 16}-01"
    )


def ended(error: PilotflameError | None = None, **more: Any) -> InvocationEnd:
    timeline = Timeline(
        10.0,
        sent_s=10.5,
        completed_s=12.0,
        responded_s=12.5,
        wait_s=0.25,
        exec_s=1.0,
        batch=more.pop("batch", 1),
    )
    return InvocationEnd("f", "r1", "q", more.pop("source", "http"), timeline, error, worker="w1", **more)


@pytest.mark.asyncio
@pytest.mark.parametrize("parent", ["3", "0", ""], ids=["parent", "an invalid parent", "none"])
async def test_the_phases_are_children_of_the_invocation(processor: Processor, parent: str) -> None:
    spans = InvocationSpans()
    spans.note_end(ended(), context(parent))
    spans.finish()
    (server,) = processor.named("f")
    assert (server.kind, f"{server.context.trace_id:032x}") == (SpanKind.SERVER, "1" * 32)
    assert f"{server.context.span_id:016x}" == "2" * 16
    assert (server.parent is not None) == (parent == "3")
    assert server.parent is None or f"{server.parent.span_id:016x}" == "3" * 16
    assert (server.end_time or 0) - (server.start_time or 0) == 2_500_000_000
    phases = [span for span in processor.spans if span is not server]
    assert [span.name for span in phases] == ["queue", "link", "wait", "exec", "respond"]
    assert all(span.parent == server.context for span in phases)
    assert {span.context.trace_id for span in phases} == {server.context.trace_id}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (None, StatusCode.UNSET, None),
        (InputInvalid("no"), StatusCode.UNSET, "input_invalid"),
        (HandlerFailed("no"), StatusCode.ERROR, "handler_failed"),
    ],
)
async def test_only_an_error_of_the_server_is_one_of_its_span(
    processor: Processor, error: PilotflameError | None, status: StatusCode, code: str | None
) -> None:
    spans = InvocationSpans()
    spans.note_end(ended(error, source="job"), context())
    spans.finish()
    (found,) = processor.named("f")
    assert (found.kind, found.status.status_code) == (SpanKind.CONSUMER, status)
    assert (found.attributes or {}).get("error.type") == code
    assert "http.response.status_code" not in (found.attributes or {})


@pytest.mark.asyncio
async def test_a_batch_is_a_span_in_a_trace_of_its_own(processor: Processor) -> None:
    spans = InvocationSpans()
    for span in "23":
        spans.note_end(ended(batch=2), context(span=span))
    spans.finish()
    (batch,) = processor.named("batch f")
    assert batch.parent is None
    assert f"{batch.context.trace_id:032x}" != "1" * 32
    assert [f"{link.context.span_id:016x}" for link in batch.links] == ["2" * 16, "3" * 16]
    assert [span.links[0].context for span in processor.named("exec")] == [batch.context] * 2
    assert not any(span.links for span in processor.named("wait"))


@pytest.mark.asyncio
async def test_spans_are_made_of_calls_that_ended_long_ago_and_of_the_rest_of_their_batches(
    processor: Processor,
) -> None:
    spans = InvocationSpans()
    for batch in (1, 2):
        spans.note_end(ended(batch=batch), context())
    until_s = time.monotonic()
    spans.note_end(ended(batch=2), context())
    spans.note_end(ended()._replace(worker="w2"), context())
    assert spans._take(0.0) == []
    assert [end.timeline.batch for end, _ in spans._take(until_s)] == [1, 2, 2]
    assert len(spans._take(time.monotonic())) == 1
    spans.finish()
