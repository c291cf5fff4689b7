"""Requests: which headers set deadline and priority, in which unit, and which values are refused or ignored."""

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from multidict import CIMultiDict
from pilotflame.errors import BadInput, InputInvalid, OutputInvalid, PilotflameError
from pilotflame.runtime.front.http.requests import (
    ENVOY,
    GRPC,
    MAX_PREFERENCES,
    MAX_PROBLEMS,
    STAINLESS,
    TIMEOUT,
    CallHeaders,
    accept_of,
    coding_of,
    content_type_of,
    idempotency_of,
    load_json,
    load_output,
    media_type_of,
    parse_preferences,
    priority_of,
    request_id_of,
    timeout_of,
    trace_of,
    validate,
    validate_output,
)
from pydantic import BaseModel

MOST = 600.0


def test_the_first_preferences_are_read() -> None:
    assert parse_preferences(["wait=5; x=1, Respond-Async", "wait=6"]) == {"wait": "5", "respond-async": ""}
    assert "b" in parse_preferences(["a," * (MAX_PREFERENCES - 1) + "b"])
    assert "b" not in parse_preferences([",,", "," * (MAX_PREFERENCES - 3) + "b,c", "b"])


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, MOST),
        ({"X-Request-Timeout": "2.5"}, 2.5),
        ({"X-Request-Timeout": "601"}, MOST),
        ({"grpc-timeout": "1H"}, MOST),
        ({"grpc-timeout": "2M"}, 120.0),
        ({"grpc-timeout": "3S"}, 3.0),
        ({"grpc-timeout": "99999999m"}, MOST),
        ({"grpc-timeout": "250m"}, 0.25),
        ({"GRPC-Timeout": "250u"}, 250e-6),
        ({"grpc-timeout": "99999999n"}, 0.099999999),
        ({"x-envoy-expected-rq-timeout-ms": "1500"}, 1.5),
        # Envoy sends 0 for no limit.
        ({"x-envoy-expected-rq-timeout-ms": "0"}, MOST),
        ({"x-stainless-read-timeout": "30"}, 30.0),
        ({"x-stainless-read-timeout": "0.5"}, 0.5),
    ],
)
def test_each_header_in_its_own_unit(headers: dict[str, str], seconds: float) -> None:
    assert timeout_of(CIMultiDict(headers), MOST) == pytest.approx(seconds)


@given(st.permutations([1.0, 2.0, 3.0, 4.0]), st.floats(0.5, 5.0))
def test_the_smallest_wins(order: list[float], most: float) -> None:
    ours, grpc, envoy, stainless = order
    headers = {
        TIMEOUT: str(ours), GRPC: f"{grpc * 1000:.0f}m", ENVOY: f"{envoy * 1000:.0f}", STAINLESS: str(stainless),
    }  # fmt: skip
    assert timeout_of(headers, most) == min(1.0, most)


@pytest.mark.parametrize("value", ["soon", "-1", "0", "nan", "inf", ""])
def test_an_invalid_value_of_our_header_is_refused_by_name(value: str) -> None:
    with pytest.raises(BadInput, match=TIMEOUT) as caught:
        timeout_of({TIMEOUT: value, GRPC: "1S"}, MOST)
    assert caught.value.status == 400
    assert caught.value.remedy


@given(st.sampled_from([GRPC, ENVOY, STAINLESS]), st.text())
@example(GRPC, "123456789S")
@example(GRPC, "1s")
@example(GRPC, "0S")
@example(GRPC, "-1S")
@example(GRPC, "1.5S")
@example(GRPC, "\u0661S")
@example(ENVOY, "1e3")
@example(ENVOY, "nan")
@example(STAINLESS, "-1")
@example(STAINLESS, "None")
@example(STAINLESS, "9" * 400)
def test_no_value_of_another_convention_fails_a_request(name: str, value: str) -> None:
    assert 0 < timeout_of({name: value}, MOST) <= MOST


@pytest.mark.parametrize("value", ["123456789S", "1s", "0S", "1.5S", "1", "S", "1 S", "\u0661S"])
def test_an_invalid_grpc_timeout_is_ignored(value: str) -> None:
    assert timeout_of({GRPC: value}, MOST) == MOST


def test_priorities() -> None:
    assert priority_of({}) == 3
    assert [priority_of({"X-Priority": str(number)}) for number in range(1, 6)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("value", ["0", "6", "-1", "high", "", "1.0", "01", "\u0661"])
def test_an_invalid_priority_is_refused_by_name(value: str) -> None:
    with pytest.raises(BadInput, match="X-Priority") as caught:
        priority_of({"X-Priority": value})
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("traceparent", "tracestate", "found"),
    [
        ("00-" + "a" * 32 + "-" + "b" * 16 + "-01", "shop=1,other=2", "shop=1,other=2"),
        ("00-" + "a" * 32 + "-" + "b" * 16 + "-01", "x" * 513, ""),
        ("00-" + "a" * 32 + "-" + "b" * 16 + "-01", "\x7f", ""),
        ("00-zz", "shop=1", ""),
        ("", "shop=1", ""),
    ],
)
def test_a_trace_state_needs_a_trace(traceparent: str, tracestate: str, found: str) -> None:
    headers = CIMultiDict({"Traceparent": traceparent, "Tracestate": tracestate})
    assert trace_of(headers) == (traceparent if len(traceparent) == 55 else "", found)


def test_a_caller_that_is_not_urgent_gets_no_priority_above_the_default() -> None:
    given = [priority_of({"X-Priority": str(number)}, urgent=False) for number in range(1, 6)]
    assert given == [3, 3, 3, 4, 5]


def test_the_times_of_a_call_are_the_smaller_ones() -> None:
    plain, asked = (
        CallHeaders.read(CIMultiDict()),
        CallHeaders.read(CIMultiDict({TIMEOUT: "5", "X-Scale-Up-Timeout": "7200"})),
    )
    assert (plain.timeout_s, plain.hold_s, plain.priority) == (math.inf, None, 3)
    assert plain.times_s(100.0, 60.0, 30.0) == (160.0, 130.0)
    # The caller may wait for longer than the function says, up to an hour.
    assert asked.times_s(100.0, 60.0, 30.0) == (105.0, 3700.0)
    assert asked.times_s(100.0, 2.0, 30.0)[0] == 102.0


@pytest.mark.parametrize(
    ("sent", "kept"),
    [("a", True), ("~" * 128, True), ("~" * 129, False), ("", False), ("a b", False), ("ä", False)],
)
def test_a_request_id_is_visible_ascii_or_made(sent: str, kept: bool) -> None:
    found = request_id_of(CIMultiDict({"X-Request-Id": sent}))
    assert (found == sent) is kept
    assert kept or len(found) == 16
    assert len({request_id_of(CIMultiDict()) for _ in range(600)}) == 600


def test_an_idempotency_key_has_a_prefix_and_a_limit() -> None:
    assert idempotency_of({}) == ""
    assert idempotency_of({"Idempotency-Key": "x" * 255}) == "key:" + "x" * 255
    with pytest.raises(BadInput, match="has 256 characters"):
        idempotency_of({"Idempotency-Key": "x" * 256})


@pytest.mark.parametrize(
    ("sent", "content_type", "media_type"),
    [
        (None, "", ""),
        ("application/json", "", "application/json"),
        ("Text/Plain; charset=x", "Text/Plain; charset=x", "text/plain"),
    ],
)
def test_a_content_type_is_passed_on_unless_it_is_json(
    sent: str | None, content_type: str, media_type: str
) -> None:
    headers = CIMultiDict({} if sent is None else {"Content-Type": sent})
    assert (content_type_of(headers), media_type_of(headers)) == (content_type, media_type)
    with pytest.raises(BadInput, match="not ASCII"):
        content_type_of({"Content-Type": "ü"})
    assert coding_of(CIMultiDict({"Content-Encoding": " GZIP "})) == "gzip"
    assert coding_of(CIMultiDict()) == ""


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        ("application/x-npy, */*", "application/x-npy, */*"),
        ("Application/X-NPY", "application/x-npy"),
        ("application/octet-stream", "application/octet-stream"),
        ("application/json", ""),
        ("ü application/x-npy", ""),
        ("application/x-npy" + " " * 1000, ""),
    ],
)
def test_only_types_of_arrays_are_negotiated(sent: str, found: str) -> None:
    assert accept_of(CIMultiDict({"Accept": sent})) == found
    assert accept_of(CIMultiDict()) == ""


class Item(BaseModel):
    count: int


class Order(BaseModel):
    items: list[Item]


def test_json_that_does_not_fit_is_refused_by_field() -> None:
    assert validate(Order, {"items": [{"count": 1}]}, "Send it.").items[0].count == 1
    for kind in (BadInput, InputInvalid):
        with pytest.raises(kind, match=r"The body is invalid: items\.0\.count: ") as refused:
            validate(Order, {"items": [{"count": "secret"}] * 50}, "Send it.", kind)
        assert refused.value.remedy == "Send it."
        assert refused.value.details["field"] == "items.0.count"
        assert 1 <= len(refused.value.details["problems"]) <= MAX_PROBLEMS
        assert "secret" not in str(refused.value.to_wire())
    with pytest.raises(BadInput, match="The body is invalid: the body: "):
        validate(Order, [], "Send it.")


@pytest.mark.parametrize("body", [b"{", b"[1,", b"nul", b"\xff"])
def test_what_is_no_json_is_refused_as_input_and_as_output(body: bytes) -> None:
    refusals: list[tuple[type[PilotflameError], Any]] = [
        (BadInput, load_json), (OutputInvalid, load_output),
        (OutputInvalid, lambda body: validate_output(Order, body, "It is wrong.", "")),
    ]  # fmt: skip
    for kind, read in refusals:
        with pytest.raises(kind):
            read(body)


def test_json_is_read_and_nothing_is_none() -> None:
    assert (load_json(b""), load_json(b"[1]"), load_output(b'"a"')) == (None, [1], "a")
    assert validate_output(Order, b'{"items": []}', "It is wrong.", "").items == []
    with pytest.raises(OutputInvalid, match="It is wrong"):
        validate_output(Order, b"[]", "It is wrong.", "")
