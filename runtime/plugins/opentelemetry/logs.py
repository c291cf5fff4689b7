"""Exports the lines of functions' logs: a queue that all functions share, and the thread that sends its lines."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, SeverityNumber
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from ...calls.serving.invocation import Invocation
from ...ground.access.fair_share import SharedRoom
from ...ground.telemetry.log_files import LogLine
from ...ground.telemetry.logs import OWN_SOURCES
from .attributes import NAME, resource
from .log_collector import LogCollector, LogTarget

DELAY_S, BATCH_LINES, BATCH_BYTES = 1.0, 512, 1 << 20
"""A batch is sent at BATCH_LINES lines, at BATCH_BYTES, or after DELAY_S with fewer lines."""
MOST_WAITING_BYTES, LINE_BYTES = 8 << 20, 400
"""The most memory of lines that wait. A line counts as LINE_BYTES plus the length of its text in UTF-8."""
MOST_TRACES = 4096
"""The number of recent invocations whose trace is known."""
SEVERITIES = {
    "debug": SeverityNumber.SEVERITY_NUMBER_DEBUG, "info": SeverityNumber.SEVERITY_NUMBER_INFO,
    "warning": SeverityNumber.SEVERITY_NUMBER_WARN, "error": SeverityNumber.SEVERITY_NUMBER_ERROR,
}  # fmt: skip
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2}).*", re.ASCII)


class WaitingLine(NamedTuple):
    line: LogLine
    traceparent: str
    size: int


class WaitingLines:
    """A queue of lines. Its memory is limited, and each function may use a share of the memory. All threads may use it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: deque[WaitingLine] = deque()
        self._room, self._overflow = SharedRoom(MOST_WAITING_BYTES), 0
        self._closed = False

    def put(self, line: LogLine, traceparent: str) -> None:
        """Add a line, or count it as lost if its function has used its share."""
        size = LINE_BYTES + len(line.text.encode(errors="replace"))
        with self._changed:
            if not self._room.takes(line.function, size):
                self._overflow += 1
                return
            self._room.add(line.function, size)
            self._lines.append(WaitingLine(line, traceparent, size))
            if len(self._lines) == 1 or self._ready():
                self._changed.notify()

    def take(self) -> list[WaitingLine]:
        """Wait for a batch, and remove it. Return [] if the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closed)
            self._changed.wait_for(self._ready, DELAY_S)
            batch, size = list[WaitingLine](), 0
            while self._lines and len(batch) < BATCH_LINES:
                size += self._lines[0].size
                if batch and size > BATCH_BYTES:
                    break
                batch.append(self._remove_first())
            return batch

    def take_overflow(self) -> int:
        """Return how many lines were lost since the last call."""
        with self._changed:
            overflow, self._overflow = self._overflow, 0
            return overflow

    def close(self) -> None:
        """Let `take` return what is left without a delay."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _remove_first(self) -> WaitingLine:
        first = self._lines.popleft()
        self._room.remove(first.line.function, first.size)
        return first

    def _ready(self) -> bool:
        return self._closed or len(self._lines) >= BATCH_LINES or self._room.total >= BATCH_BYTES


class LogExport:
    """Takes lines on the event loop, and sends them in a thread. If the collector is slow, lines are dropped."""

    def __init__(self, target: LogTarget) -> None:
        self._waiting, self._ended = WaitingLines(), threading.Event()
        about = Resource(attributes=list(_attributes(dict(resource(NAME).attributes))))
        self._target, self._collector = target, LogCollector(target, about, self._ended)
        self._traces = OrderedDict[tuple[str, str], str]()
        """Maps a function and the id of a request to the `traceparent` of the invocation."""
        self._thread = threading.Thread(target=self._run, name="opentelemetry-logs", daemon=True)
        self._thread.start()

    def begin(self, function: str, invocation: Invocation) -> None:
        """Remember the trace of an invocation, for the lines that it prints."""
        if traceparent := invocation.span or invocation.traceparent:
            self._traces[function, invocation.id] = traceparent
            if len(self._traces) > MOST_TRACES:
                self._traces.popitem(last=False)

    def note(self, line: LogLine) -> None:
        """Send a line soon, if there is room for it."""
        trace = self._traces.get((line.function, line.request_id), "") if line.request_id else ""
        self._waiting.put(line, trace)

    def shutdown(self) -> None:
        """Send the lines that wait. Blocks, at most for the timeout of each request."""
        self._ended.set()
        self._waiting.close()
        self._thread.join()

    def _run(self) -> None:
        with self._target.collector:
            while lines := self._waiting.take():
                self._deliver(lines)

    def _deliver(self, lines: list[WaitingLine]) -> None:
        failure = None
        try:
            lost, why = self._collector.deliver([_record(one.line, one.traceparent) for one in lines])
        except Exception as error:  # noqa: BLE001  the thread goes on with the lines that follow
            lost, why, failure = len(lines), type(error).__name__, error
        overflow = self._waiting.take_overflow()
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
