"""What the spans of invocations hold while they wait to be made."""

from __future__ import annotations

import weakref

import pytest
from pilotflame.runtime.ground.telemetry.invocation_end import InvocationEnd, TraceContext
from pilotflame.runtime.ground.telemetry.timeline import Timeline
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
