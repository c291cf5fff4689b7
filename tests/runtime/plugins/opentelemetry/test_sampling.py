"""Which invocations are sampled: the standard samplers decide, and requests without a trace follow their share."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    DEFAULT_OFF,
    DEFAULT_ON,
    ParentBasedTraceIdRatio,
    Sampler,
    TraceIdRatioBased,
)
from pilotflame.runtime.ground.telemetry.timeline import TRACEPARENT
from pilotflame.runtime.plugins.opentelemetry.sampling import TraceSampling, parent_of, span_of

FORM = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]")
SAMPLING = TraceSampling(DEFAULT_ON)
BY_CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


def roots(sampler: Sampler, count: int) -> list[str]:
    return list(itertools.islice(TraceSampling(sampler).roots, count))


@pytest.mark.parametrize(
    "sampler", [ALWAYS_ON, DEFAULT_ON, TraceIdRatioBased(1.0), ParentBasedTraceIdRatio(1.0)]
)
def test_all_requests_are_sampled(sampler: Sampler) -> None:
    found = roots(sampler, 100)
    assert all(FORM.fullmatch(one) and one.endswith("-01") for one in found)
    assert len({one[3:35] for one in found}) == len({one[36:52] for one in found}) == 100


@pytest.mark.parametrize("sampler", [ALWAYS_OFF, DEFAULT_OFF, TraceIdRatioBased(0.0)])
def test_no_request_is_sampled(sampler: Sampler) -> None:
    assert not any(roots(sampler, 1000))


@pytest.mark.parametrize("share", [0.5, 0.1, 0.01])
def test_a_share_of_the_requests_is_sampled_by_ids_that_the_sampler_takes(share: float) -> None:
    sampler = TraceIdRatioBased(share)
    found = [one for one in roots(ParentBasedTraceIdRatio(share), 40_000) if one]
    # Allow six standard deviations.
    assert abs(len(found) - 40_000 * share) < 6 * (40_000 * share * (1 - share)) ** 0.5
    # Another service with the same sampler samples all these traces, too.
    assert all(sampler.should_sample(None, int(one[3:35], 16), "x").decision.value for one in found)


@pytest.mark.parametrize(
    ("sampler", "flags", "sampled"),
    [
        (DEFAULT_ON, "01", True),
        (DEFAULT_ON, "00", False),
        (DEFAULT_OFF, "01", True),
        (ParentBasedTraceIdRatio(0.0), "01", True),
        (ALWAYS_ON, "00", True),
        (ALWAYS_OFF, "01", False),
    ],
)
def test_the_sampler_decides_about_a_request_with_a_trace(
    sampler: Sampler, flags: str, sampled: bool
) -> None:
    found = TraceSampling(sampler).child(BY_CALLER + flags)
    assert FORM.fullmatch(found)
    assert (found[:36], found.endswith("-01")) == (BY_CALLER[:36], sampled)
    assert found[36:52] != BY_CALLER[36:52]


@pytest.mark.parametrize(
    "parent", [BY_CALLER + "01-more", "00-" + "0" * 32 + BY_CALLER[35:] + "01", "ff" + BY_CALLER[2:] + "01"]
)
def test_an_invalid_parent_is_ignored(parent: str) -> None:
    found = TraceSampling(ALWAYS_ON).child(parent)
    assert FORM.fullmatch(found)
    assert found[3:35] != BY_CALLER[3:35]


@given(st.from_regex(TRACEPARENT, fullmatch=True))
def test_the_spans_of_callers_are_read_as_the_sdk_reads_them(traceparent: str) -> None:
    found, known = SAMPLING.child(traceparent), span_of(parent_of(traceparent, ""))
    assert FORM.fullmatch(found)
    if known.is_valid:
        assert (found[3:35], found.endswith("-01")) == (f"{known.trace_id:032x}", known.trace_flags.sampled)
    else:
        assert found[3:35] != traceparent[3:35]


def test_the_share_also_holds_for_callers_with_a_trace() -> None:
    sampler = TraceIdRatioBased(0.25)
    sampling = TraceSampling(sampler)
    for number in range(200):
        trace_id = (1 << 64) + number * (1 << 64) // 200
        found = sampling.child(f"00-{trace_id:032x}{BY_CALLER[35:]}00")
        assert found.endswith("-01") is (number < 50)
