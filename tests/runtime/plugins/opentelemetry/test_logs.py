"""Lines of logs that a collector refuses, takes late or never takes; the variables of the exporter."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

import pytest
from otlp_receiver import OtlpReceiver, otlp_receiver, values_of
from pilotflame.errors import GatewayError
from pilotflame.runtime.ground.telemetry.log_files import LogLine
from pilotflame.runtime.plugins.opentelemetry import log_collector, logs
from pilotflame.runtime.plugins.opentelemetry.log_collector import LogTarget
from pilotflame.runtime.plugins.opentelemetry.logs import LogExport, WaitingLines
from pilotflame.runtime.plugins.opentelemetry.observer import FLUSH_S

DELAY_S = logs.DELAY_S


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "DELAY_S", 0.01)
    monkeypatch.setattr(log_collector, "RETRIES_S", (0.01, 0.01))


def line(text: str, function: str = "tone") -> LogLine:
    return LogLine(time.time(), "gateway", text, "warning", function, "r1")


def texts(collector: OtlpReceiver) -> list[str]:
    return [one.body.string_value for one, _ in collector.lines]


async def exported(collector: OtlpReceiver, *given: str, **variables: str) -> None:
    """Send lines, each in a batch of its own, and wait for the end of the export."""
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"{collector.url}/", **variables}
    export = LogExport(LogTarget.of(environ))
    for text in given:
        export.note(line(text))
    await asyncio.to_thread(export.shutdown)


async def test_a_busy_collector_is_asked_again_and_a_refusal_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "BATCH_LINES", 1)
    async with otlp_receiver() as collector:
        collector.answers = [503, 429, 200, 400, 200]
        export = LogExport(LogTarget.of({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}))
        for text in ("late", "refused", "taken"):
            export.note(line(text))
        await collector.until(lambda: len(collector.lines) == 2)
        await asyncio.to_thread(export.shutdown)
        assert texts(collector) == ["late", "taken"]
    warnings = [record.getMessage() for record in caplog.records if record.name == log_collector.__name__]
    assert [text.rpartition(": ")[2] for text in warnings[:1]] == ["HTTP 400"]
    assert warnings[1:] == ["the collector takes lines of logs again; it did not get 1 earlier lines"]


async def test_too_many_lines_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "MOST_WAITING_BYTES", 4 * (logs.LINE_BYTES + 1))
    monkeypatch.setattr(logs, "DELAY_S", 60)
    async with otlp_receiver() as collector:
        await exported(collector, *"abcdef")
        assert texts(collector) == ["a", "b", "c"]
    assert "does not get 3 lines of logs: they came faster" in caplog.text


async def test_a_function_with_many_lines_leaves_room_for_the_lines_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "MOST_WAITING_BYTES", 20 * (logs.LINE_BYTES + 1))
    monkeypatch.setattr(logs, "DELAY_S", 60)
    async with otlp_receiver() as collector:
        export = LogExport(LogTarget.of({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}))
        for _ in range(100):
            export.note(line("a", "loud"))
        export.note(line("b", "quiet"))
        await asyncio.to_thread(export.shutdown)
        assert texts(collector) == ["a"] * 17 + ["b"]


@pytest.mark.parametrize("stops", [False, True])
async def test_a_backlog_is_sent_without_a_delay_between_its_batches(
    monkeypatch: pytest.MonkeyPatch, *, stops: bool
) -> None:
    monkeypatch.setattr(logs, "DELAY_S", DELAY_S)
    async with otlp_receiver() as collector:
        export = LogExport(LogTarget.of({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}))
        for number in range(7 * logs.BATCH_LINES + 10):
            export.note(line(f"{number}"))
        async with asyncio.timeout(FLUSH_S):
            if not stops:
                await collector.until(lambda: len(collector.lines) >= 7 * logs.BATCH_LINES)
            await asyncio.to_thread(export.shutdown)
        assert texts(collector) == [f"{number}" for number in range(7 * logs.BATCH_LINES + 10)]


async def test_a_batch_has_a_limit_of_bytes_and_is_halved_if_the_collector_finds_it_too_large(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver answers 413 to more than 1 MiB."""
    waiting, long = WaitingLines(), "x" * (15 << 10)
    for _ in range(100):
        waiting.put(line(long), "")
    assert sum(one.size for one in waiting.take()) <= logs.BATCH_BYTES
    monkeypatch.setattr(logs, "BATCH_BYTES", 4 << 20)
    async with otlp_receiver() as collector:
        await exported(collector, *[long] * 200, "the last")
        assert len(collector.lines) == 201
        collector.answers = [413]
        await exported(collector, "alone")
    assert "does not get 1 lines of logs: HTTP 413" in caplog.text


async def test_an_unexpected_error_loses_its_batch_and_the_thread_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "BATCH_LINES", 1)
    async with otlp_receiver() as collector:
        export = LogExport(LogTarget.of({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}))
        export.note(line("without a time")._replace(at=math.nan))
        export.note(line("half a pair")._replace(level="\udc80"))
        await asyncio.to_thread(export.shutdown)
        assert [(one.body.string_value, one.severity_text) for one, _ in collector.lines] == [
            ("half a pair", "?")
        ]
    assert "does not get 1 lines of logs: ValueError" in caplog.text
    assert "it did not get 1 earlier lines" in caplog.text


async def test_a_busy_collector_chooses_the_delay_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_collector, "LONGEST_DELAY_S", 0.3)
    async with otlp_receiver() as collector:
        collector.answers, collector.retry_after = [429], "60"
        export = LogExport(LogTarget.of({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}))
        started_s = time.monotonic()
        export.note(line("late"))
        await collector.until(lambda: collector.lines)
        assert time.monotonic() - started_s >= 0.3
        await asyncio.to_thread(export.shutdown)


@pytest.mark.parametrize("headers", ["", "key=secret%0A"])
async def test_the_gateways_log_shows_no_credentials(caplog: pytest.LogCaptureFixture, headers: str) -> None:
    endpoint = "http://user:secret@127.0.0.1:9/v1/logs?key=secret"
    variables = {"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_HEADERS": headers}
    export = LogExport(LogTarget.of(variables))
    export.note(line("lost"))
    await asyncio.to_thread(export.shutdown)
    assert "the collector at http://127.0.0.1:9/v1/logs does not get 1 lines" in caplog.text
    assert "secret" not in caplog.text


async def test_a_collector_that_is_gone_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    export = LogExport(LogTarget.of({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}))
    export.note(line("lost"))
    async with asyncio.timeout(5):
        await asyncio.to_thread(export.shutdown)
    assert "127.0.0.1:9/v1/logs does not get 1 lines of logs" in caplog.text


async def test_the_variables_of_the_exporter_count() -> None:
    async with otlp_receiver() as collector:
        await exported(collector, "zipped \udc80", OTEL_EXPORTER_OTLP_COMPRESSION="gzip")
        assert texts(collector) == ["zipped ?"]
        assert values_of(collector.lines[0][0].attributes) == {"faas.name": "tone", "faas.version": "r1"}
    target = LogTarget.of(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c",
            "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://d/lines",
            "OTEL_EXPORTER_OTLP_HEADERS": "key=a%20b",
            "OTEL_EXPORTER_OTLP_LOGS_TIMEOUT": "3",
        }
    )
    with target.collector as client:
        assert (target.url, client.headers["key"], client.timeout.read) == ("http://d/lines", "a b", 3.0)
    assert not target.zipped


async def test_an_answer_in_another_form_counts_as_success(caplog: pytest.LogCaptureFixture) -> None:
    async with otlp_receiver() as collector:
        collector.answers = [202]
        await exported(collector, "first")
        assert not texts(collector)
    assert "does not get" not in caplog.text


@pytest.mark.parametrize(("name", "value"), [("TIMEOUT", "soon"), ("CERTIFICATE", "none.pem")])
async def test_a_wrong_variable_is_named(name: str, value: str, tmp_path: Path) -> None:
    value = str(tmp_path / value) if name == "CERTIFICATE" else value
    with pytest.raises(GatewayError, match=f"{name}='{value}'"):
        LogTarget.of({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", f"OTEL_EXPORTER_OTLP_{name}": value})


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT"])
@pytest.mark.parametrize("value", ["localhost:4318", "http://", "http://u:secret@c:x", "ftp://c"])
async def test_an_endpoint_that_is_no_url_is_named(name: str, value: str) -> None:
    with pytest.raises(GatewayError, match=f"^{name} is not an http") as caught:
        LogTarget.of({name: value})
    assert "secret" not in f"{caught.value.message}{caught.value.remedy}"
