"""The picture of a function's load: what is drawn where, and that every input makes a picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.commands.load_picture import LEFT, RIGHT, LoadPicture

SVG = "{http://www.w3.org/2000/svg}"
AT = 1_790_000_000.0


def sample(offset_s: float, **facts: Any) -> dict[str, Any]:
    at = datetime.fromtimestamp(AT + offset_s, UTC).isoformat()
    blank = {
        "queued": 0,
        "in_flight": 0,
        "starting": 0,
        "ready": 0,
        "rung": "local",
        "cold": 0,
        "slowest_cold_s": 0.0,
    }
    return {"at": at, **blank, **facts}


def drawn(
    samples: list[dict[str, Any]], arrivals: list[float] | None = None, end_s: float = 100.0
) -> ET.Element:
    return ET.fromstring(LoadPicture("embed", samples, arrivals or [], AT, AT + end_s).svg())


def strips(root: ET.Element, kind: str) -> list[tuple[float, float]]:
    """Return begin and end of each rectangle of the rung's strip, as shares of the time."""
    found = [
        node for node in root.iter(f"{SVG}rect") if node.get("class") == kind and node.get("height") == "26.0"
    ]
    width = RIGHT - LEFT
    left = [(float(node.get("x", 0)) - LEFT) / width for node in found]
    return [
        (round(at, 2), round(at + float(node.get("width", 0)) / width, 2))
        for at, node in zip(left, found, strict=True)
    ]


def test_rungs_follow_each_other_and_the_last_lasts_until_now() -> None:
    root = drawn(
        [sample(-50, rung="zygote"), sample(20, rung="ready"), sample(30, rung="ready", ready=2), sample(80)]
    )
    assert strips(root, "amber") == [(0.0, 0.2)]
    assert strips(root, "orange") == [(0.2, 0.8)]
    assert strips(root, "pale") == [(0.8, 1.0)]


def test_the_title_counts_what_is_in_the_picture() -> None:
    samples = [
        sample(-5, cold=7, queued=9),
        sample(10, cold=2, ready=3, queued=4, slowest_cold_s=0.25),
        sample(20),
    ]
    root = drawn(samples, [AT - 1, AT + 10, AT + 11, AT + 101])
    (title,) = [node.text for node in root.iter(f"{SVG}text") if node.get("class") == "title"]
    assert title == "embed: 2 calls, 2 of them cold; at most 3 workers ready and 9 calls waiting"
    (cold,) = root.iter(f"{SVG}circle")
    assert cold[0].text == "2 waited for a worker, up to 250 ms"


NUMBERS = st.integers(0, 10_000)


@given(
    st.lists(
        st.builds(
            sample, st.floats(-1e5, 1e5), queued=NUMBERS, in_flight=NUMBERS, starting=NUMBERS, ready=NUMBERS,
            cold=NUMBERS, slowest_cold_s=st.floats(0, 1e4), rung=st.sampled_from(["ready", "local", "new <rung>"]),
        )
    ),
    st.lists(st.floats(AT - 10, AT + 1e5)).map(sorted),
    st.floats(0, 1e8),
)  # fmt: skip
def test_every_load_makes_a_picture(
    samples: list[dict[str, Any]], arrivals: list[float], end_s: float
) -> None:
    root = drawn(sorted(samples, key=lambda one: str(one["at"])), arrivals, end_s)
    for node in root.iter():
        for field in ("x", "y", "width", "height", "cx", "cy"):
            assert -1 <= float(node.get(field, 0)) <= 1000, ET.tostring(node)
