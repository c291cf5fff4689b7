"""Accept headers: what is preferred, compared with werkzeug's reading of the same header."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pilotflame.handlers.negotiation import MAX_RANGES, preferred, weigh
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

JSON, NPY, BYTES = OFFERED = ("application/json", "application/x-npy", "application/octet-stream")
RANGES = st.tuples(
    st.sampled_from([*OFFERED, "application/*", "*/*", "text/html", "Application/X-NPY"]),
    st.sampled_from(["", ";q=1", "; q=0.5", ";q=0.001", ";q=0", ";Q=1.000", "; level=1; q=0.5"]),
).map("".join)


@pytest.mark.parametrize(
    ("header", "best"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        ("application/x-npy", NPY),
        ("APPLICATION/X-NPY", NPY),
        ("application/x-npy, */*", NPY),  # a named type comes before a wildcard
        ("application/x-npy;q=0.5, */*", JSON),
        ("application/json, application/x-npy", JSON),  # of equal types the first
        ("application/x-npy, application/json", NPY),
        ("application/json;q=0.9, application/x-npy", NPY),
        ("application/json, application/x-npy;q=0", JSON),
        ("application/*, application/json;q=0.1", NPY),
        ("text/html", ""),
        ("application/json;q=0", ""),
        ('text/html;a=",application/x-npy", application/json', JSON),
        ("application/x-npy;q=2, application/json;q=0.1", JSON),  # an invalid quality is ignored
        ("application/x-npy;q=, application/json", JSON),
        (" , ,;q=1,application/x-npy ,", NPY),
    ],
)
def test_the_preferred_offer(header: str, best: str) -> None:
    assert preferred(header, OFFERED) == best


@given(st.lists(RANGES, max_size=5, unique_by=lambda one: one.partition(";")[0].lower()))
@example(["application/*", "application/json;q=0"])
def test_qualities_are_those_that_werkzeug_reads(ranges: list[str]) -> None:
    header = ", ".join(ranges)
    theirs = parse_accept_header(header.lower().replace("; level=1", ""), MIMEAccept)
    for name in OFFERED:
        assert weigh(header, name).quality == theirs.quality(name)


@given(st.text() | st.text('aq/*;=,"\\ 0.1', max_size=40))
def test_any_text_is_read(header: str) -> None:
    assert preferred(header, OFFERED) in ("", *OFFERED)
    assert 0 <= weigh(header, JSON).quality <= 1


def test_a_long_header_is_read_in_part_and_in_time() -> None:
    assert preferred("a/b," * (MAX_RANGES - 1) + NPY, OFFERED) == NPY
    assert preferred("a/b," * MAX_RANGES + NPY, OFFERED) == ""
    for hostile in ('"' * 50_000, ';"' * 50_000, '\\"' * 50_000, ";" * 50_000):
        assert preferred(hostile, OFFERED) == ""
