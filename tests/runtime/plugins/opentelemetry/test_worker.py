"""The observer of handlers' calls: when a worker has an observer, and which span is current during a call."""

from __future__ import annotations

import contextvars
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from pilotflame.handlers.contract import Context
from pilotflame.runtime.calls.link.worker_spec import WorkerSpec
from pilotflame.runtime.plugins.opentelemetry import worker
from pilotflame.runtime.plugins.opentelemetry.worker import HandlerSpans, observe

SPEC = WorkerSpec(function="f", revision="r1", code=Path("/code"))
TRACE = "0af7651916cd43dd8448eb211c80319c"
LOADED = """
import json, sys
from pathlib import Path
from pilotflame.runtime.calls.link.worker_spec import WorkerSpec
from pilotflame.runtime.plugins.opentelemetry.worker import observe

observer = observe(WorkerSpec(function="f", revision="r1", code=Path("/code")))
print(json.dumps([observer is None, "opentelemetry" in sys.modules, "aiohttp" in sys.modules]))
"""


def context(span: str = "", flags: str = "01") -> Context:
    return Context(
        "f", "r1", traceparent=f"00-{TRACE}-{span * 16}-{flags}" if span else "", tracestate="shop=1"
    )


def current(spans: HandlerSpans, *contexts: Context) -> trace.SpanContext:
    """Return the current span in a handler call for invocations with these contexts."""

    def call() -> trace.SpanContext:
        spans.begin(contexts)
        return trace.get_current_span().get_span_context()

    return contextvars.copy_context().run(call)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> HandlerSpans:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    found = observe(SPEC)
    assert found is not None
    return found


def test_a_handler_without_opentelemetry_has_none() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout) == [True, False, False]


def test_it_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert observe(SPEC) is None


def test_the_span_of_the_invocation_is_current(spans: HandlerSpans) -> None:
    found = current(spans, context("a"))
    assert (f"{found.trace_id:032x}", f"{found.span_id:016x}") == (TRACE, "a" * 16)
    assert (found.trace_flags.sampled, found.trace_state.to_header()) == (True, "shop=1")


def test_the_first_sampled_span_of_a_batch_is_current(spans: HandlerSpans) -> None:
    found = current(spans, context(), context("b", "00"), context("c"), context("d"))
    assert f"{found.span_id:016x}" == "c" * 16
    assert f"{current(spans, context('b', '00'), context()).span_id:016x}" == "b" * 16


def test_without_a_span_nothing_is_sampled(spans: HandlerSpans) -> None:
    first, second = current(spans, context()), current(spans, context())
    assert (first.is_valid, first.trace_flags.sampled) == (True, False)
    assert first.trace_id != second.trace_id


def test_without_an_exporter_the_end_is_quick(spans: HandlerSpans) -> None:
    current(spans, context("a"))
    spans.close()
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


class Providers:
    """Stands for `opentelemetry.trace`, whose provider can be set only once in a process."""

    def __init__(self, own: object = None) -> None:
        self.set = [own or trace.ProxyTracerProvider()]

    def __getattr__(self, name: str) -> Any:
        return getattr(trace, name)

    def get_tracer_provider(self) -> object:
        return self.set[-1]

    def set_tracer_provider(self, provider: object) -> None:
        self.set.append(provider)


def test_the_first_sampled_call_starts_the_export(spans: HandlerSpans) -> None:
    providers: Any = Providers()
    shut = threading.Event()
    spans._trace, spans._make = providers, lambda: SimpleNamespace(shutdown=shut.set)
    current(spans, context("a", "00"))
    assert len(providers.set) == 1
    for span in "bc":
        current(spans, context(span))
    assert len(providers.set) == 2
    spans.close()
    assert shut.is_set()


def test_a_handler_that_has_set_a_provider_keeps_it(spans: HandlerSpans) -> None:
    providers: Any = Providers(own=object())
    spans._trace, spans._make = providers, lambda: SimpleNamespace(shutdown=None)
    current(spans, context("a"))
    assert len(providers.set) == 1
    spans.close()


def test_a_collector_that_does_not_answer_keeps_no_worker_alive(
    spans: HandlerSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "FLUSH_S", 0.01)
    before, answer = set(threading.enumerate()), threading.Event()
    spans._shutdown = lambda: answer.wait(30) and None
    spans.close()
    (left,) = set(threading.enumerate()) - before
    # At the end of a process, Python waits for all threads that are not daemons.
    assert left.daemon
    answer.set()
    left.join(30)
