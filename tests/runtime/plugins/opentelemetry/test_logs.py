"""Lines of logs that a collector refuses, takes late or never takes; the variables of the exporter."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from otlp_receiver import OtlpReceiver, otlp_receiver, values_of
from pilotflame.errors import GatewayError
from pilotflame.runtime.plugins.opentelemetry import logs
from pilotflame.runtime.plugins.opentelemetry.logs import LogExport, LogTarget
from pilotflame.runtime.telemetry.log_files import LogLine


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "DELAY_S", 0.01)
    monkeypatch.setattr(logs, "RETRIES_S", (0.01, 0.01))


def line(text: str) -> LogLine:
    return LogLine(time.time(), "gateway", text, "warning", "tone", "r1")


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
    warnings = [record.getMessage() for record in caplog.records if record.name == logs.__name__]
    assert [text.rpartition(": ")[2] for text in warnings[:1]] == ["HTTP 400"]
    assert warnings[1:] == ["the collector takes lines of logs again; it did not get 1 earlier lines"]


async def test_too_many_lines_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "MOST_WAITING", 3)
    monkeypatch.setattr(logs, "DELAY_S", 60)
    async with otlp_receiver() as collector:
        await exported(collector, *"abcdef")
        assert texts(collector) == ["a", "b", "c"]
    assert "does not get 3 lines of logs: they came faster" in caplog.text


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
