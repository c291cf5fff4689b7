"""Sends the lines of functions' logs to a collector, as messages of OTLP over HTTP.

The SDK's modules for logs have private names, so this uses only the messages of the protocol, which are public.
"""

from __future__ import annotations

import gzip
import logging
import re
import ssl
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import httpx
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs, SeverityNumber
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.util.re import parse_env_headers

from ...._version import __version__
from ....errors import GatewayError
from ...serving.invocation import Invocation
from ...telemetry.log_files import LogLine
from ...telemetry.logs import OWN_SOURCES
from .attributes import NAME, resource

LOG = logging.getLogger(__name__)
DELAY_S, BATCH_LINES, MOST_WAITING = 1.0, 512, 4096
"""BATCH_LINES lines are sent at once, or fewer DELAY_S after the first. At most MOST_WAITING lines wait."""
RETRIES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""The delays before a batch is sent again."""
RETRIED = frozenset({429, 502, 503, 504})
MOST_TRACES = 4096
"""The number of recent invocations whose trace is known."""
SEVERITIES = {
    "debug": SeverityNumber.SEVERITY_NUMBER_DEBUG, "info": SeverityNumber.SEVERITY_NUMBER_INFO,
    "warning": SeverityNumber.SEVERITY_NUMBER_WARN, "error": SeverityNumber.SEVERITY_NUMBER_ERROR,
}  # fmt: skip
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2}).*", re.ASCII)


class LogTarget(NamedTuple):
    """The collector's route for logs, a client with the headers for it, and whether requests are compressed."""

    url: httpx.URL
    collector: httpx.Client
    zipped: bool

    @staticmethod
    def of(environ: Mapping[str, str]) -> LogTarget:
        """Return the target that OpenTelemetry's variables name. Raises GatewayError."""

        def read(name: str, default: str = "") -> str:
            own, shared = f"OTEL_EXPORTER_OTLP_LOGS_{name}", f"OTEL_EXPORTER_OTLP_{name}"
            return environ.get(own) or environ.get(shared) or default

        shared = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").rstrip("/")
        file, timeout = read("CERTIFICATE"), read("TIMEOUT", "10")
        try:
            url = httpx.URL(environ.get("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT") or f"{shared}/v1/logs")
            trust = ssl.create_default_context(cafile=file) if file else True
            headers = parse_env_headers(read("HEADERS"), liberal=True)
            client = httpx.Client(headers=headers, timeout=float(timeout), verify=trust)
        except (OSError, ValueError, httpx.InvalidURL) as error:
            # A header may be a secret, so the message has no text of the error.
            fault = f"Logs cannot be exported with OTEL_EXPORTER_OTLP_TIMEOUT={timeout!r}, …_CERTIFICATE={file!r} and the given endpoint and headers"
            remedy = "Set an http(s) URL, seconds, the path of a file in PEM, and headers in ASCII."
            raise GatewayError(f"{fault} ({type(error).__name__}).", remedy=remedy) from None
        return LogTarget(url, client, read("COMPRESSION").lower() == "gzip")


class LogExport:
    """Takes lines on the event loop, and sends them in a thread. If the collector is slow, lines are dropped."""

    def __init__(self, target: LogTarget) -> None:
        self._target = target
        self._resource = Resource(attributes=list(_attributes(dict(resource(NAME).attributes))))
        self._waiting: deque[tuple[LogLine, str]] = deque()
        self._overflow = self._dropped = 0
        self._traces = OrderedDict[tuple[str, str], str]()
        """Maps a function and the id of a request to the `traceparent` of the invocation."""
        self._arrived, self._full, self._ended = threading.Event(), threading.Event(), threading.Event()
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
        with self._target.collector as collector:
            while True:
                self._arrived.wait()
                self._full.wait(DELAY_S)
                self._arrived.clear()
                self._full.clear()
                ended = self._ended.is_set()
                if lines := [self._waiting.popleft() for _ in range(min(BATCH_LINES, len(self._waiting)))]:
                    self._deliver(collector, lines)
                if self._waiting:
                    self._arrived.set()
                elif ended:
                    return

    def _deliver(self, collector: httpx.Client, lines: Sequence[tuple[LogLine, str]]) -> None:
        """Send lines, again after failures that may pass. Otherwise drop them, and log why."""
        body = self._message(lines)
        headers = {"Content-Type": "application/x-protobuf"}
        if self._target.zipped:
            body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
        for delay_s in (*RETRIES_S, None):
            try:
                response = collector.post(self._target.url, content=body, headers=headers)
                if response.is_success:
                    return self._note_sent(response.content)
                why, again = f"HTTP {response.status_code}", response.status_code in RETRIED
            except httpx.HTTPError as error:
                why, again = str(error) or type(error).__name__, True
            if not again or delay_s is None or self._ended.wait(delay_s):
                break
        return self._note_lost(len(lines), why)

    def _note_sent(self, answer: bytes) -> None:
        try:
            rejected = ExportLogsServiceResponse.FromString(answer).partial_success
        except DecodeError:
            # A proxy in between may answer for the collector.
            rejected = ExportLogsServiceResponse().partial_success
        overflow, self._overflow = self._overflow, 0
        if rejected.rejected_log_records or overflow:
            why = rejected.error_message or "they came faster than the collector took them"
            return self._note_lost(rejected.rejected_log_records + overflow, why)
        if self._dropped:
            LOG.warning(
                "the collector takes lines of logs again; it did not get %d earlier lines", self._dropped
            )
        self._dropped = 0
        return None

    def _note_lost(self, lines: int, why: str) -> None:
        if not self._dropped:
            LOG.warning("the collector at %s does not get %d lines of logs: %s", self._target.url, lines, why)
        self._dropped += lines

    def _message(self, lines: Sequence[tuple[LogLine, str]]) -> bytes:
        records = [_record(line, trace) for line, trace in lines]
        scope = ScopeLogs(scope=InstrumentationScope(name=NAME, version=__version__), log_records=records)
        group = ResourceLogs(resource=self._resource, scope_logs=[scope])
        return ExportLogsServiceRequest(resource_logs=[group]).SerializeToString()


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
        severity_text=line.level, attributes=list(_attributes({key: text for key, text in facts.items() if text})),
        trace_id=bytes.fromhex(trace_id), span_id=bytes.fromhex(span_id), flags=int(flags, 16),
    )  # fmt: skip


def _attributes(values: Mapping[str, object]) -> Iterator[KeyValue]:
    for key, value in values.items():
        yield KeyValue(key=key, value=AnyValue(string_value=_sound(str(value))))


def _sound(text: str) -> str:
    """Return the text without unpaired surrogates, which UTF-8 does not have."""
    return text.encode(errors="replace").decode()
