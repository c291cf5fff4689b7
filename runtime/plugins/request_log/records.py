"""Makes a record of a call: a JSON object with input and output, in which redacted fields have no values."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import orjson

from ....handlers.codec import JSON_TYPE
from ...front.http.responses import timestamp
from ...ground.settings.request_log import ANY_PART, parts_of
from ...ground.telemetry.invocation_end import InvocationEnd

REDACTED = "[redacted]"
MAX_PAYLOAD_BYTES = 256 << 10
"""Of a larger input or output, only the size is in the log."""
OVERHEAD_BYTES = 1024


class LoggedCall(NamedTuple):
    """A call that has ended: the facts for its record, and its input and output. An input or output that is no JSON or too large is None."""

    facts: dict[str, Any]
    input: bytes | None
    output: bytes | None

    @classmethod
    def of(cls, end: InvocationEnd) -> LoggedCall:
        given = (end.call.body, end.call.content_type) if end.call is not None else (b"", "")
        facts = {
            "at": timestamp(time.time()), "function": end.function, "revision": end.revision, "request_id": end.request_id,
            "source": end.source, "status": end.code, "error": None if end.error is None else end.error.code,
            "seconds": round(end.timeline.total_s, 6),
            "input_bytes": len(given[0]), "output_bytes": None if end.output is None else len(end.output[0]),
        }  # fmt: skip
        return cls(facts, _kept(*given), None if end.output is None else _kept(*end.output))

    @property
    def size(self) -> int:
        """About how much memory the call takes."""
        return OVERHEAD_BYTES + len(self.input or b"") + len(self.output or b"")


def _kept(content: bytes, content_type: str) -> bytes | None:
    """Return the content if it is JSON and not too large. Other content cannot be redacted."""
    kind = content_type.partition(";")[0].strip().lower()
    is_json = kind in ("", JSON_TYPE) or kind.endswith("+json")
    return content if is_json and len(content) <= MAX_PAYLOAD_BYTES else None


def record_of(call: LoggedCall, redactor: Redactor) -> dict[str, Any]:
    """Return the record of a call. A value that is not JSON, or too large, is None."""
    record = {**call.facts, "input": _parsed(call.input), "output": _parsed(call.output)}
    redactor.redact(record)
    return record


def _parsed(content: bytes | None) -> Any:
    try:
        return orjson.loads(content) if content else None
    except orjson.JSONDecodeError:
        return None


class Redactor:
    """Replaces the values of fields. Each rule is a JSON pointer or, without a slash in front, a name at any depth."""

    def __init__(self, rules: Iterable[str]) -> None:
        rules = tuple(rules)
        self._pointers = [parts_of(rule) for rule in rules if rule.startswith("/")]
        self._names = {rule.casefold() for rule in rules if not rule.startswith("/")}

    def redact(self, record: dict[str, Any]) -> None:
        """Redact `record` in place. The case of names does not count."""
        for *above, last in self._pointers:
            for holder in find(record, above):
                for key in _keys(holder, last):
                    holder[key] = REDACTED
        if self._names:
            self._redact_names([record["input"], record["output"]])

    def _redact_names(self, waiting: list[Any]) -> None:
        # Not recursive, because JSON may be nested more deeply than Python's calls.
        while waiting:
            value = waiting.pop()
            if isinstance(value, list):
                waiting += value
            elif isinstance(value, dict):
                for name in value:
                    if name.casefold() in self._names:
                        value[name] = REDACTED
                waiting += value.values()


def find(value: Any, parts: Iterable[str]) -> Iterator[Any]:
    """Yield each value in `value` that the parts of a pointer identify."""
    found = [value]
    for part in parts:
        found = [holder[key] for holder in found for key in _keys(holder, part)]
    yield from found


def _keys(holder: Any, part: str) -> list[Any]:
    """Return the keys of an object, or the indexes of a list, that a part of a pointer stands for."""
    if isinstance(holder, dict):
        return list(holder) if part == ANY_PART else [part] if part in holder else []
    if isinstance(holder, list):
        if part == ANY_PART:
            return list(range(len(holder)))
        is_index = part.isascii() and part.isdecimal() and len(part) < 10
        return [int(part)] if is_index and int(part) < len(holder) else []
    return []
