"""From a message to what a job is given."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from ..telemetry.timeline import TRACEPARENT


def job_input(body: bytes) -> bytes:
    """The body if it is JSON, else JSON's text of it: a handler is given what the sender wrote."""
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return orjson.dumps(body.decode("utf-8", "replace"))
    return body


def trace(attributes: Mapping[str, str]) -> str:
    """The sender's trace context, if the message has one."""
    given = attributes.get("traceparent", "")
    return given if TRACEPARENT.fullmatch(given) else ""
