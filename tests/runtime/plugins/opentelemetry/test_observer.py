"""Traces, metrics and logs of real invocations arrive at a collector, by OTLP over HTTP."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from doc_blocks import blocks
from live import Function, Gate, Gateway, gateway_here, gateway_process, short_folder, until
from otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver, values_of
from pilotflame.errors import GatewayError
from pilotflame.runtime.ground.telemetry.timeline import parse_server_timing
from pilotflame.runtime.plugins.opentelemetry import logs
from pilotflame.runtime.plugins.opentelemetry.observer import is_wanted, run_for

pytestmark = pytest.mark.asyncio(loop_scope="module")
ECHOES = """
def handler(event, context):
    return {"traceparent": context.traceparent, "tracestate": context.tracestate}
"""
FAILS = "def handler(event):\n    raise ValueError(event)\n"
GREETS = """
from pilotflame import Delta, GenerationRequest

async def handler(event: GenerationRequest, context):
    yield Delta(text="hel", tokens=[1])
    yield Delta(text="lo", tokens=[2], finish_reason="stop", usage={"prompt_tokens": 3, "completion_tokens": 2})
"""
BATCHES = """
import pilotflame, gate

@pilotflame.batch(max_size=4)
def handler(events):
    gate.wait("batch")
    return events
"""
PRINTS = """
import logging

def handler(event):
    print("hello")
    logging.getLogger("shop").error("broken")
"""
PAGE = Path(__file__).parents[4] / "docs" / "opentelemetry.md"
TRACES = """
from opentelemetry import trace

tracer = trace.get_tracer("mine")

{define} handler(event, context):
    with tracer.start_as_current_span("outer"), tracer.start_as_current_span("inner"):
        return context.traceparent
"""
SERVER, CONSUMER = 2, 5


class Observed(NamedTuple):
    """A gateway that exports to a collector."""

    gateway: Gateway
    collector: OtlpReceiver

    async def deploy(self, handler: str, **how: object) -> Function:
        return await self.gateway.deploy(handler, **how)


class Caller(NamedTuple):
    """The span of a caller."""

    trace: str
    span: str
    sampled: bool = True

    @property
    def header(self) -> str:
        return f"00-{self.trace}-{self.span}-0{int(self.sampled)}"


def caller(*, sampled: bool = True) -> Caller:
    return Caller(secrets.token_hex(16), secrets.token_hex(8), sampled)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def observed() -> AsyncIterator[Observed]:
    with pytest.MonkeyPatch.context() as patch, short_folder() as folder:
        async with otlp_receiver() as collector:
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
            patch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
            patch.setenv("OTEL_LOGS_EXPORTER", "otlp")
            patch.setattr(logs, "DELAY_S", 0.05)
            async with gateway_here(folder / "state", drain_s=5.0) as gateway:
                yield Observed(gateway, collector)


def within(inner: ReceivedSpan, outer: ReceivedSpan) -> bool:
    return outer.started_s - 1e-3 <= inner.started_s <= inner.ended_s <= outer.ended_s + 1e-3


async def test_spans_of_a_cold_request_match_its_server_timing(observed: Observed) -> None:
    function, by = await observed.deploy(ECHOES, name="cold"), caller()
    response = await function.call(traceparent=by.header, tracestate="shop=a1", X_Request_Id="first-1")
    assert response.headers["X-Cold-Start"] == "true"
    timing = parse_server_timing(response.headers["Server-Timing"])
    total_ms = timing.pop("total")
    spans = await observed.collector.of_trace(by.trace, "cold", "respond")
    server = spans.pop("cold")
    assert abs(server.seconds * 1e3 - total_ms) < 1
    assert (server.parent, server.kind, server.state) == (by.span, SERVER, "shop=a1")
    for name, ms in timing.items():
        assert ms < 0.002 or abs(spans[name].seconds * 1e3 - ms) < 1, name
    assert {"queue", "fork", "restore", "link", "wait", "exec", "respond"} >= spans.keys() - {"dispatch"}
    starts = [spans[name].started_s for name in ("fork", "restore", "link", "exec", "respond")]
    assert starts == sorted(starts)
    assert all(one.parent == server.id and within(one, server) for one in spans.values())
    # The handler gets the server's span in `traceparent`. The caller gets its own header back.
    assert response.json() == {"traceparent": f"00-{by.trace}-{server.id}-01", "tracestate": "shop=a1"}
    assert response.headers["traceparent"] == by.header
    known = {"faas.name": "cold", "faas.invocation_id": "first-1", "faas.trigger": "http", "faas.coldstart": True,
             "faas.version": function.described["revision"], "http.response.status_code": 200,
             "faas.instance": response.headers["X-Worker-Id"]}  # fmt: skip
    assert server.attributes == known
    assert server.resource["service.name"] == "pilotflame"


async def test_requests_that_aiohttp_reads(observed: Observed) -> None:
    """aiohttp handles a request with the header Origin, and a request that becomes a job."""
    function, by = await observed.deploy(ECHOES, name="beside"), caller()
    await function.call(traceparent=by.header, Origin="http://localhost")
    spans = await observed.collector.of_trace(by.trace, "beside", "exec", "respond")
    assert spans["beside"].kind == SERVER
    job = caller()
    sent = await function.call(traceparent=job.header, Prefer="respond-async")
    assert sent.status_code == 202
    spans = await observed.collector.of_trace(job.trace, "beside", "exec")
    assert (spans["beside"].kind, spans["beside"].attributes["faas.trigger"]) == (CONSUMER, "other")


async def test_the_callers_decision_holds(observed: Observed) -> None:
    function, unsampled = await observed.deploy(ECHOES, name="decided"), caller(sampled=False)
    answer = await function.answer(traceparent=unsampled.header)
    assert answer["traceparent"].startswith(f"00-{unsampled.trace}-")
    assert answer["traceparent"].endswith("-00")
    # The gateway ignores an invalid header with only zeros, and begins a new trace.
    answer = await function.answer(traceparent=f"00-{'0' * 32}-{'0' * 16}-01")
    assert answer["traceparent"].endswith("-01")
    await observed.collector.of_trace(answer["traceparent"][3:35], "decided")
    assert not [one for one in observed.collector.spans if one.trace == unsampled.trace]


async def test_a_failure_is_an_error_of_its_span_and_counted(observed: Observed) -> None:
    function, by = await observed.deploy(FAILS, name="fails"), caller()
    assert (await function.error("x", traceparent=by.header))["type"] == "handler_failed"
    span = (await observed.collector.of_trace(by.trace, "fails"))["fails"]
    assert (span.failed, span.attributes["error.type"]) == (True, "handler_failed")
    (point,) = await observed.collector.points(
        "faas.errors", faas__name="fails", error__type="handler_failed"
    )
    assert point.as_int == 1


async def test_a_batch_is_linked_to_its_requests(observed: Observed, gate: Gate) -> None:
    function = await observed.deploy(BATCHES, name="batches", gate=gate)
    first = asyncio.create_task(function.call(0))
    waiting = await gate.next("batch")
    callers = [caller() for _ in range(3)]
    others = [asyncio.create_task(function.call(1, traceparent=one.header)) for one in callers]

    async def queued() -> bool:
        return bool((await function.status())["queued"] == 3)

    await until(queued, "three waiting calls")
    waiting.go()
    (await gate.next("batch")).go()
    await asyncio.gather(first, *others)
    members = [await observed.collector.of_trace(one.trace, "batches", "exec") for one in callers]
    ids = {spans["batches"].id for spans in members}
    (batch,) = await observed.collector.until(
        lambda: [one for one in observed.collector.spans if set(one.links) == ids]
    )
    assert (batch.name, batch.parent, batch.attributes["pilotflame.batch.size"]) == ("batch batches", "", 3)
    assert all(spans["exec"].links == (batch.id,) for spans in members)
    assert all(abs(batch.seconds - spans["exec"].seconds) < 1e-3 for spans in members)


@pytest.mark.parametrize("define", ["def", "async def"])
async def test_spans_of_a_handler_are_in_the_span_of_its_invocation(observed: Observed, define: str) -> None:
    settings = {
        "env.OTEL_EXPORTER_OTLP_ENDPOINT": observed.collector.url,
        "env.OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    name = f"traces-{len(define)}"
    function = await observed.deploy(TRACES.format(define=define), name=name, settings=settings)
    for _ in range(2):
        by = caller()
        await function.answer(traceparent=by.header)
        spans = await observed.collector.of_trace(by.trace, name, "outer", "inner")
        assert spans["outer"].parent == spans[name].id
        assert spans["inner"].parent == spans["outer"].id
        assert within(spans["outer"], spans[name])
        assert spans["outer"].resource["faas.name"] == spans["outer"].resource["service.name"] == name
    # An invocation that is not sampled has no spans of its handler, either.
    unsampled = caller(sampled=False)
    await function.answer(traceparent=unsampled.header)
    await observed.gateway.client.delete(f"/v1/functions/{name}")
    assert not [one for one in observed.collector.spans if one.trace == unsampled.trace]


async def test_the_handler_of_the_page(observed: Observed) -> None:
    (source,) = (one.text for one in blocks(PAGE.read_text()) if one.language == "python")
    settings = {
        "env.OTEL_EXPORTER_OTLP_ENDPOINT": observed.collector.url,
        "env.OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    function, by = await observed.deploy(source, name="page", settings=settings), caller()
    assert await function.answer({"count": 2}, traceparent=by.header) == {"price": 6}
    spans = await observed.collector.of_trace(by.trace, "page", "price")
    assert spans["price"].parent == spans["page"].id


async def test_the_last_spans_of_a_worker_are_sent_at_its_end(observed: Observed) -> None:
    settings = {
        "env.OTEL_EXPORTER_OTLP_ENDPOINT": observed.collector.url,
        "env.OTEL_BSP_SCHEDULE_DELAY": "60000",
    }
    function = await observed.deploy(TRACES.format(define="def"), name="last", settings=settings)
    by = caller()
    await function.answer(traceparent=by.header)
    await observed.gateway.client.delete("/v1/functions/last")
    await observed.collector.of_trace(by.trace, "outer", "inner")


async def test_answers_of_a_language_model(observed: Observed) -> None:
    await observed.deploy(GREETS, name="greets")
    by = caller()
    body = {"model": "greets", "messages": [{"role": "user", "content": "Hi"}]}
    response = await observed.gateway.client.post(
        "/openai/v1/chat/completions", json=body, headers={"traceparent": by.header}
    )
    assert response.status_code == 200, response.text
    spans = await observed.collector.of_trace(by.trace, "greets", "generate greets")
    span = spans["generate greets"]
    assert span.parent == spans["greets"].id
    usage = {name: span.attributes[f"gen_ai.usage.{name}"] for name in ("input_tokens", "output_tokens")}
    assert (usage, span.attributes["gen_ai.request.model"]) == (
        {"input_tokens": 3, "output_tokens": 2},
        "greets",
    )
    for name in ("request.duration", "time_to_first_token", "time_per_output_token"):
        (point,) = await observed.collector.points(f"gen_ai.server.{name}", gen_ai__request__model="greets")
        assert point.count == 1
        assert point.sum > 0


async def test_metrics_of_functions(observed: Observed) -> None:
    function = await observed.deploy(ECHOES, name="counted")
    for _ in range(3):
        await function.call()

    def counted() -> bool:
        points = {
            one.attributes[0].value.string_value: one
            for one in observed.collector.metrics["faas.invoke_duration"]
        }
        return "counted" in points and points["counted"].count == 3

    await observed.collector.until(counted)
    (cold,) = await observed.collector.points("faas.coldstarts", faas__name="counted")
    (init,) = await observed.collector.points("faas.init_duration", faas__name="counted")
    (timeouts,) = await observed.collector.points("faas.timeouts", faas__name="counted")
    assert (cold.as_int, init.count, timeouts.as_int) == (1, 1, 0)
    assert init.sum > 0


async def test_lines_of_a_function_have_its_trace(observed: Observed) -> None:
    function, by = await observed.deploy(PRINTS, name="prints"), caller()
    response = await function.call(traceparent=by.header, X_Request_Id="printed-1")
    spans = await observed.collector.of_trace(by.trace, "prints")

    def found() -> dict[str, tuple[Any, dict[str, Any]]]:
        lines = {line.body.string_value: (line, its) for line, its in observed.collector.lines}
        return lines if {"hello", "broken"} <= lines.keys() else {}

    lines = await observed.collector.until(found)
    for text, level in (("hello", "info"), ("broken", "error")):
        line, its = lines[text]
        assert (line.severity_text, line.severity_number) == (level, {"info": 9, "error": 17}[level])
        assert (line.trace_id.hex(), line.span_id.hex(), line.flags) == (by.trace, spans["prints"].id, 1)
        assert values_of(line.attributes) == {
            "faas.name": "prints",
            "faas.version": function.described["revision"],
            "faas.instance": response.headers["X-Worker-Id"],
            "faas.invocation_id": "printed-1",
        }
        assert its["service.name"] == "pilotflame"
        assert abs(line.time_unix_nano / 1e9 - spans["prints"].ended_s) < 60


async def exports(gateway: Gateway) -> bool:
    """Return True if the gateway's process has loaded the native code of the exporter."""
    assert gateway.process is not None
    maps = Path(f"/proc/{gateway.process.pid}/maps")
    return "google/_upb" in await asyncio.to_thread(maps.read_text)


async def test_a_collector_that_is_gone_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are answered, and the gateway ends in time."""
    with short_folder() as folder:
        # Nothing listens at port 9.
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "50"}
        async with gateway_process(folder / "state", environ=environ) as gateway:
            function = await gateway.deploy(ECHOES)
            answers = [await function.answer() for _ in range(20)]
            assert all(one["traceparent"].endswith("-01") for one in answers)
            assert await exports(gateway)
            assert gateway.process is not None
            gateway.process.terminate()
            async with asyncio.timeout(15):
                assert await gateway.process.wait() in (0, -15)


async def test_the_last_spans_of_a_gateway_are_sent_at_its_end() -> None:
    environ = {
        "OTEL_BSP_SCHEDULE_DELAY": "60000",
        "OTEL_METRIC_EXPORT_INTERVAL": "60000",
        "OTEL_LOGS_EXPORTER": "otlp",
    }
    with short_folder() as folder:
        async with otlp_receiver() as collector:
            environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.url
            async with gateway_process(folder / "state", environ=environ) as gateway:
                function, by = await gateway.deploy(ECHOES, name="ends"), caller()
                await function.answer(traceparent=by.header)
                before_end = await asyncio.to_thread((folder / "gateway.log").read_text)
                assert gateway.process is not None
                gateway.process.terminate()
                await collector.of_trace(by.trace, "ends", "exec")
                assert await collector.points("faas.invoke_duration", faas__name="ends")
                async with asyncio.timeout(15):
                    await gateway.process.wait()
            log = await asyncio.to_thread((folder / "gateway.log").read_text)
    assert [line for line, _ in collector.lines if values_of(line.attributes)["faas.name"] == "ends"]
    assert "Error" not in log.removeprefix(before_end)


async def test_without_an_endpoint_nothing_is_imported() -> None:
    with short_folder() as folder:
        # Set the variable to nothing, because a fixture of this module has set it.
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}
        async with gateway_process(folder / "state", environ=environ) as gateway:
            source = "import sys\ndef handler(event, context):\n    return [context.traceparent, 'opentelemetry' in sys.modules]"
            function = await gateway.deploy(source)
            assert await function.answer() == ["", False]
            assert not await exports(gateway)


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "True"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
    ],
)
async def test_the_variables_decide(environ: dict[str, str], wanted: bool) -> None:
    assert is_wanted("TRACES", environ) is wanted


async def test_logs_are_exported_on_request_only() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}
    assert not is_wanted("LOGS", environ)
    assert is_wanted("LOGS", {**environ, "OTEL_LOGS_EXPORTER": "otlp"})


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_TRACES_EXPORTER", "console"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]
)
async def test_an_exporter_that_is_not_here_is_refused(name: str, value: str) -> None:
    with pytest.raises(GatewayError, match=f"{name} is '{value}', which pilotflame does not have"):
        is_wanted("TRACES", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", name: value})


async def test_a_flush_has_a_deadline(caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()
    await run_for(0.05, go.wait)
    go.set()
    assert "did not take the last spans" in caplog.text
