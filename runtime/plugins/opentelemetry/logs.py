"""Exports the lines of functions' logs: a queue, and the thread that sends its lines."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, SeverityNumber
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from ...serving.invocation import Invocation
from ...telemetry.log_files import LogLine
from ...telemetry.logs import OWN_SOURCES
from .attributes import NAME, resource
from .log_collector import LogCollector, LogTarget

DELAY_S, BATCH_LINES, MOST_WAITING = 1.0, 512, 4096
"""BATCH_LINES lines are sent at once, or fewer DELAY_S after the first. At most MOST_WAITING lines wait."""
MOST_TRACES = 4096
"""The number of recent invocations whose trace is known."""
SEVERITIES = {
    "debug": SeverityNumber.SEVERITY_NUMBER_DEBUG, "info": SeverityNumber.SEVERITY_NUMBER_INFO,
    "warning": SeverityNumber.SEVERITY_NUMBER_WARN, "error": SeverityNumber.SEVERITY_NUMBER_ERROR,
}  # fmt: skip
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2}).*", re.ASCII)


class LogExport:
    """Takes lines on the event loop, and sends them in a thread. If the collector is slow, lines are dropped."""

    def __init__(self, target: LogTarget) -> None:
        about = Resource(attributes=list(_attributes(dict(resource(NAME).attributes))))
        self._waiting: deque[tuple[LogLine, str]] = deque()
        self._overflow = 0
        self._traces = OrderedDict[tuple[str, str], str]()
        """Maps a function and the id of a request to the `traceparent` of the invocation."""
        self._arrived, self._full, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._target, self._collector = target, LogCollector(target, about, self._ended)
        self._thread = threading.Thread(target=self._run, name="opentelemetry-logs", daemon=True)
        self._thread.start()

    def begin(self, function: str, invocation: Invocation) -> None:
        """Remember the trace of an invocation, for the lines that it prints."""
        if traceparent := invocation.span or invocation.traceparent:
            self._traces[function, invocation.id] = traceparent
            if len(self._traces) > MOST_TRACES:
                self._traces.popitem(last=False)

    def note(self, line: LogLine) -> None:
        """Send a line soon, if not too many lines wait."""
        if len(self._waiting) >= MOST_WAITING:
            self._overflow += 1
            return
        trace = self._traces.get((line.function, line.request_id), "") if line.request_id else ""
        self._waiting.append((line, trace))
        self._arrived.set()
        if len(self._waiting) >= BATCH_LINES:
            self._full.set()

    def shutdown(self) -> None:
        """Send the lines that wait. Blocks, at most for the timeout of each request."""
        for event in (self._ended, self._arrived, self._full):
            event.set()
        self._thread.join()

    def _run(self) -> None:
        with self._target.collector:
            while True:
                self._arrived.wait()
                self._full.wait(DELAY_S)
                self._arrived.clear()
                self._full.clear()
                ended = self._ended.is_set()
                if lines := [self._waiting.popleft() for _ in range(min(BATCH_LINES, len(self._waiting)))]:
                    self._deliver(lines)
                if self._waiting:
                    self._arrived.set()
                elif ended:
                    return

    def _deliver(self, lines: Sequence[tuple[LogLine, str]]) -> None:
        failure = None
        try:
            lost, why = self._collector.deliver([_record(line, trace) for line, trace in lines])
        except Exception as error:  # noqa: BLE001  the thread goes on with the lines that follow
            lost, why, failure = len(lines), type(error).__name__, error
        overflow, self._overflow = self._overflow, 0
        why = why or "they came faster than the collector took them"
        self._collector.report(lost + overflow, why, failure)


def _record(line: LogLine, traceparent: str) -> LogRecord:
    at_ns = int(line.at * 1e9)
    worker = "" if line.source in OWN_SOURCES else line.source
    facts = {
        "faas.name": line.function, "faas.version": line.revision, "faas.instance": worker,
        "faas.invocation_id": line.request_id,
    }  # fmt: skip
    found = _TRACEPARENT.fullmatch(traceparent)
    trace_id, span_id, flags = found.groups() if found is not None else ("", "", "0")
    return LogRecord(
        time_unix_nano=at_ns, observed_time_unix_nano=at_ns, body=AnyValue(string_value=_sound(line.text)),
        severity_number=SEVERITIES.get(line.level, SeverityNumber.SEVERITY_NUMBER_INFO),
        severity_text=_sound(line.level), attributes=list(_attributes({key: text for key, text in facts.items() if text})),
        trace_id=bytes.fromhex(trace_id), span_id=bytes.fromhex(span_id), flags=int(flags, 16),
    )  # fmt: skip


def _attributes(values: Mapping[str, object]) -> Iterator[KeyValue]:
    for key, value in values.items():
        yield KeyValue(key=key, value=AnyValue(string_value=_sound(str(value))))


def _sound(text: str) -> str:
    """Return the text without unpaired surrogates, which UTF-8 does not have."""
    return text.encode(errors="replace").decode()
