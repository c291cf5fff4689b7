"""Sends records of logs to a collector, as messages of OTLP over HTTP.

The SDK's modules for logs have private names, so this module uses only the messages of the protocol, which are public.
"""

from __future__ import annotations

import gzip
import logging
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import httpx
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.util.re import parse_env_headers

from ...._version import __version__
from ....errors import GatewayError
from ....snapshot.sources.location import ServerAddress, shown
from ...jobs.webhooks.http_post import parse_retry_after
from .attributes import NAME

LOG = logging.getLogger(__name__)
RETRIES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""The delays before a batch is sent again. A longer Retry-After replaces a delay, up to LONGEST_DELAY_S."""
LONGEST_DELAY_S = 30.0
RETRIED = frozenset({429, 502, 503, 504})
TOO_LARGE = 413


class LogTarget(NamedTuple):
    """The collector's route for logs, a client with the headers for it, and whether requests are compressed."""

    url: httpx.URL
    collector: httpx.Client
    zipped: bool

    @staticmethod
    def of(environ: Mapping[str, str]) -> LogTarget:
        """Return the target that OpenTelemetry's variables name. Raise GatewayError if a variable is invalid."""

        def read(name: str, default: str = "") -> str:
            own, shared = f"OTEL_EXPORTER_OTLP_LOGS_{name}", f"OTEL_EXPORTER_OTLP_{name}"
            return environ.get(own) or environ.get(shared) or default

        file, timeout = read("CERTIFICATE"), read("TIMEOUT", "10")
        url = _endpoint(environ)
        try:
            trust = ssl.create_default_context(cafile=file) if file else True
            headers = parse_env_headers(read("HEADERS"), liberal=True)
            client = httpx.Client(headers=headers, timeout=float(timeout), verify=trust)
        except (OSError, ValueError) as error:
            # A header may be a secret, so the message has no text of the error.
            fault = f"Logs cannot be exported with OTEL_EXPORTER_OTLP_TIMEOUT={timeout!r}, …_CERTIFICATE={file!r} and the given headers"
            remedy = "Set seconds, the path of a file in PEM, and headers in ASCII."
            raise GatewayError(f"{fault} ({type(error).__name__}).", remedy=remedy) from None
        return LogTarget(url, client, read("COMPRESSION").lower() == "gzip")


def _endpoint(environ: Mapping[str, str]) -> httpx.URL:
    name, path = "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", ""
    if not environ.get(name):
        name, path = "OTEL_EXPORTER_OTLP_ENDPOINT", "/v1/logs"
    value = environ.get(name, "")
    text = f"{value.rstrip('/')}{path}" if path else value
    try:
        ServerAddress.of(text)
        return httpx.URL(text)
    except (ValueError, httpx.InvalidURL):
        # The value may hold credentials, so the message does not show it.
        fault = f"{name} is not an http(s) URL."
        raise GatewayError(fault, remedy="Set a URL such as http://collector:4318.") from None


class LogCollector:
    """Delivers batches of records, and logs losses."""

    def __init__(self, target: LogTarget, resource: Resource, ended: threading.Event) -> None:
        """Once `ended` is set, a batch that fails is not sent again."""
        self._target, self._resource, self._ended = target, resource, ended
        self._where = shown(str(target.url))
        self._dropped = 0

    def deliver(self, records: Sequence[LogRecord]) -> tuple[int, str]:
        """Send records. Repeat this after failures that may be temporary. Return how many records are lost, and why."""
        status, why, answer = self._post(self._message(records))
        if status == TOO_LARGE and len(records) > 1:
            middle = len(records) // 2
            parts = [self.deliver(part) for part in (records[:middle], records[middle:])]
            return sum(lost for lost, _ in parts), next((why for lost, why in parts if lost), "")
        if why:
            return len(records), why
        return _rejected(answer)

    def report(self, lost: int, why: str, error: Exception | None = None) -> None:
        """Log the first loss after a success, and the first success after a loss."""
        if lost and not self._dropped:
            LOG.warning(
                "the collector at %s does not get %d lines of logs: %s",
                self._where,
                lost,
                why,
                exc_info=error,
            )
        elif not lost and self._dropped:
            LOG.warning(
                "the collector takes lines of logs again; it did not get %d earlier lines", self._dropped
            )
        self._dropped = self._dropped + lost if lost else 0

    def _post(self, body: bytes) -> tuple[int, str, bytes]:
        """Return the status (0 without a response), the failure or "", and the body of the response."""
        headers = {"Content-Type": "application/x-protobuf"}
        if self._target.zipped:
            body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
        for delay_s in (*RETRIES_S, None):
            status, asked_s = 0, 0.0
            try:
                response = self._target.collector.post(self._target.url, content=body, headers=headers)
                status, why = response.status_code, f"HTTP {response.status_code}"
                if response.is_success:
                    return status, "", response.content
                asked_s = parse_retry_after(response.headers.get("Retry-After", ""), time.time())
            except httpx.LocalProtocolError:
                # The message of the error quotes the header, which may be a secret.
                return 0, "OTEL_EXPORTER_OTLP_HEADERS has characters that a header cannot have", b""
            except httpx.HTTPError as error:
                why = str(error) or type(error).__name__
            again = not status or status in RETRIED
            if not again or delay_s is None or self._ended.wait(max(delay_s, min(asked_s, LONGEST_DELAY_S))):
                break
        return status, why, b""

    def _message(self, records: Sequence[LogRecord]) -> bytes:
        scope = ScopeLogs(scope=InstrumentationScope(name=NAME, version=__version__), log_records=records)
        group = ResourceLogs(resource=self._resource, scope_logs=[scope])
        return ExportLogsServiceRequest(resource_logs=[group]).SerializeToString()


def _rejected(answer: bytes) -> tuple[int, str]:
    """Return how many records the collector has rejected, and why."""
    try:
        partial = ExportLogsServiceResponse.FromString(answer).partial_success
    except DecodeError:
        # Count no loss: a proxy may have answered for the collector.
        return 0, ""
    lost = partial.rejected_log_records
    return lost, (partial.error_message or "it rejects them") if lost else ""
