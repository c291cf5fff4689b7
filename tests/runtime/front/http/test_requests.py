"""Requests: which headers set deadline and priority, in which unit, and which values are refused or ignored."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from multidict import CIMultiDict
from pilotflame.errors import BadInput
from pilotflame.runtime.front.http.requests import (
    ENVOY,
    GRPC,
    MAX_PREFERENCES,
    STAINLESS,
    TIMEOUT,
    parse_preferences,
    priority_of,
    timeout_of,
    trace_of,
)

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
