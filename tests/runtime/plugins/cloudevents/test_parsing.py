"""Parsing of CloudEvents: what the SDK sends is understood, and an invalid event is refused with its reason."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import pytest
from cloudevents.core.bindings.http import to_binary, to_structured
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from pilotflame.errors import EventInvalid, InputTooLarge, PilotflameError, UnsupportedMedia
from pilotflame.runtime.plugins.cloudevents.parsing import (
    BATCHED,
    MAX_EVENTS,
    STRUCTURED,
    ReceivedEvent,
    is_event,
)
from pilotflame.runtime.plugins.cloudevents.parsing import parse as parse_request

PLAIN = {"specversion": "1.0", "id": "1", "source": "/mine", "type": "made"}
FORBIDDEN = "".join(chr(code) for code in [*range(0x20), *range(0x7F, 0xA0), 0xFDD0, 0xFFFE, 0xFFFF])
texts = st.text(st.characters(codec="utf-8", exclude_characters=FORBIDDEN), min_size=1, max_size=40)
words = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=20)
KNOWN = {"id", "source", "type", "specversion", "time", "subject", "data", "dataschema", "datacontenttype"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def parse(headers: Mapping[str, str], body: bytes) -> list[ReceivedEvent]:
    return parse_request(CIMultiDict(headers), body)


def binary(**changes: str | None) -> dict[str, str]:
    return {f"ce-{name}": value for name, value in (PLAIN | changes).items() if value is not None}


def one(found: list[ReceivedEvent]) -> ReceivedEvent:
    assert len(found) == 1
    return found[0]


def structured(event: Any, content_type: str = STRUCTURED) -> list[ReceivedEvent]:
    return parse({"Content-Type": content_type}, json.dumps(event).encode())


# -- what the SDK sends


@given(texts, texts, st.dictionaries(words.filter(lambda word: word not in KNOWN), texts, max_size=3), JSON)
def test_events_of_the_sdk(kind: str, name: str, more: dict[str, str], data: Any) -> None:
    # Put the value into an object, because the SDK writes any other value as its repr.
    data = {"it": data}
    wanted = {"type": kind, "source": "urn:test", "id": name, **more}
    event = CloudEvent({**wanted, "datacontenttype": "application/json"}, data)
    for write in (to_binary, to_structured):
        message = write(event, JSONFormat())
        body = message.body.encode() if isinstance(message.body, str) else message.body
        found = one(parse(message.headers, body))
        assert wanted.items() <= dict(found.attributes).items()
        assert json.loads(found.data) == data
        assert found.content_type == ""
        assert found.idempotency == f"ce:urn:test\n{name}"


def test_text_and_bytes_are_unchanged() -> None:
    for data, kind in (("straße", "text/plain"), (b"\x00\xff", "application/x-thing")):
        event = CloudEvent({"type": "t", "source": "s", "id": "1", "datacontenttype": kind}, data)
        for write in (to_binary, to_structured):
            message = write(event, JSONFormat())
            found = one(parse(message.headers, message.body))
            assert found.data == (data if isinstance(data, bytes) else data.encode())
            assert found.content_type == kind


# -- which requests are events


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "application/json"},
        {"ce-id": "1", "ce-source": "x"},
        {"Content-Type": "text/plain"},
    ],
)
def test_other_requests_are_not_events(headers: dict[str, str]) -> None:
    assert not is_event(headers)


@pytest.mark.parametrize("media", ["application/cloudevents", "application/cloudevents+xml", "application/cloudevents+protobuf", "application/cloudevents+json; charset=utf-16"])  # fmt: skip
def test_other_formats_are_refused(media: str) -> None:
    with pytest.raises(UnsupportedMedia):
        parse({"content-type": media}, b"{}")


@pytest.mark.parametrize("media", [STRUCTURED.upper(), f"{STRUCTURED}; charset=UTF-8", f'{STRUCTURED};charset="utf-8"'])  # fmt: skip
def test_media_types_ignore_case_and_parameters(media: str) -> None:
    assert one(structured(PLAIN | {"data": 1}, media)).data == b"1"


# -- binary mode


def test_names_have_any_case_and_values_are_unquoted_and_percent_decoded() -> None:
    headers = {"CE-SpecVersion": "1.0", "Ce-Id": '"a \\"b\\""', "ce-source": "/%C3%A9", "ce-TYPE": "t%20u", "ce-more": "%e2%82%ac%", "Content-Type": "text/csv"}  # fmt: skip
    found = one(parse(headers, b"a,b"))
    assert found.attributes["id"] == 'a "b"'
    assert (found.attributes["source"], found.attributes["type"], found.attributes["more"]) == (
        "/é",
        "t u",
        "€%",
    )
    assert (found.data, found.content_type, found.attributes["datacontenttype"]) == (
        b"a,b",
        "text/csv",
        "text/csv",
    )


@pytest.mark.parametrize("media", ["", "application/json", "application/json; charset=utf-8", "application/vnd.x+json", "text/json"])  # fmt: skip
def test_all_json_media_types_are_json(media: str) -> None:
    assert one(parse(binary() | ({"Content-Type": media} if media else {}), b"{}")).content_type == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"id": None}, {"source": None}, {"specversion": None}, {"type": None, "specversion": "1.0"}, {"id": ""},
        {"specversion": "0.3"}, {"specversion": "1.1"}, {"source": "a b"}, {"type": "%00"}, {"subject": ""},
        {"subject": "%ff"}, {"subject": "%C2%85"}, {"time": "yesterday"}, {"time": "2026-13-01T00:00:00Z"},
        {"time": "2026-01-01"}, {"dataschema": "relative"}, {"data": "x"}, {"datacontenttype": "text/plain"},
        {"my-name": "x"}, {"id": "\udcff"},
    ],
)  # fmt: skip
def test_invalid_headers_are_refused(changes: dict[str, str | None]) -> None:
    with pytest.raises(EventInvalid) as raised:
        parse(binary(**changes), b"")
    assert raised.value.status == 400
    assert raised.value.remedy


@pytest.mark.parametrize("time", ["2026-01-31T12:00:00Z", "2026-01-31t23:59:60.123456789+02:30"])
def test_times_are_unchanged(time: str) -> None:
    assert one(parse(binary(time=time), b"")).attributes["time"] == time


def test_json_data_is_checked_and_normalized() -> None:
    assert one(parse(binary(), b' {"a" : [1, 2]}\n')).data == b'{"a":[1,2]}'
    with pytest.raises(EventInvalid, match="not JSON"):
        parse(binary() | {"Content-Type": "application/json"}, b"a,b")
    with pytest.raises(EventInvalid):
        parse(binary(), b"[" * 400 + b"]" * 400)


# -- structured mode


@pytest.mark.parametrize(
    ("fields", "data", "kind"),
    [
        ({}, b"", ""),
        ({"data": None}, b"null", ""),
        ({"data": {"a": [1]}}, b'{"a":[1]}', ""),
        ({"data": "text"}, b'"text"', ""),
        ({"data": "<a/>", "datacontenttype": "text/xml"}, b"<a/>", "text/xml"),
        ({"data": {"a": 1}, "datacontenttype": "text/xml"}, b'{"a":1}', ""),
        ({"data_base64": base64.b64encode(b"\0").decode()}, b"\0", "application/octet-stream"),
        (
            {"data_base64": base64.b64encode(b"[1]").decode(), "datacontenttype": "application/json"},
            b"[1]",
            "",
        ),
        ({"subject": None, "data": 1}, b"1", ""),
    ],
)
def test_data(fields: dict[str, Any], data: bytes, kind: str) -> None:
    found = one(structured(PLAIN | fields))
    assert (found.data, found.content_type) == (data, kind)


@pytest.mark.parametrize(
    "event",
    [
        None, 1, [], "x", {}, PLAIN | {"id": 1}, PLAIN | {"Upper": "x"}, PLAIN | {"n": 1.5}, PLAIN | {"n": {}},
        PLAIN | {"n": 2**31}, PLAIN | {"data": 1, "data_base64": "MQ=="}, PLAIN | {"data_base64": "?"},
        PLAIN | {"data_base64": 1}, PLAIN | {"n": "\x07"}, PLAIN | {"datacontenttype": "nonsense"},
        PLAIN | {"source": ""}, PLAIN | {"type": None}, PLAIN | {"id": True}, PLAIN | {"x" * 65: "long"},
    ],
)  # fmt: skip
def test_invalid_objects_are_refused(event: Any) -> None:
    with pytest.raises(EventInvalid):
        structured(event)


def test_values_of_extensions_keep_their_types() -> None:
    found = one(structured(PLAIN | {"whole": -5, "yes": True, "text": "", "gone": None}))
    assert {**found.attributes} == PLAIN | {"whole": -5, "yes": True, "text": ""}


def test_too_large_events_are_refused() -> None:
    with pytest.raises(InputTooLarge):
        structured(PLAIN | {"more": "x" * 70_000})
    with pytest.raises(InputTooLarge):
        structured(PLAIN | {f"a{n}": "x" for n in range(100)})
    with pytest.raises(InputTooLarge):
        structured([PLAIN] * (MAX_EVENTS + 1), BATCHED)
    deep = json.dumps(PLAIN)[:-1] + ', "data": ' + "[" * 400 + "]" * 400 + "}"
    with pytest.raises(EventInvalid):
        parse({"Content-Type": STRUCTURED}, deep.encode())


# -- batched mode


def test_batches() -> None:
    found = structured([PLAIN | {"id": str(n), "data": n} for n in range(3)], BATCHED)
    assert [event.data for event in found] == [b"0", b"1", b"2"]
    assert structured([], BATCHED) == []


def test_an_invalid_event_of_a_batch_is_named() -> None:
    with pytest.raises(EventInvalid, match=r"event 1: .*'type'"):
        structured([PLAIN, {**PLAIN, "type": None}], BATCHED)
    with pytest.raises(EventInvalid):
        structured(PLAIN, BATCHED)


def refused(headers: dict[str, str], body: bytes) -> int:
    """Return the status with which a request is refused; 0 if it is accepted."""
    try:
        parse(headers, body)
    except PilotflameError as error:
        return error.status
    return 0


@given(st.binary(max_size=60), st.sampled_from([STRUCTURED, BATCHED]))
def test_any_body_is_accepted_or_refused(body: bytes, media: str) -> None:
    assert refused({"Content-Type": media}, body) in (0, 400)


@given(st.dictionaries(st.sampled_from(["ce-id", "ce-type", "ce-source", "ce-specversion", "ce-time", "ce-é"]), st.text(max_size=10)))  # fmt: skip
def test_any_header_is_accepted_or_refused(headers: dict[str, str]) -> None:
    assert refused(headers, b"") in (0, 400)
