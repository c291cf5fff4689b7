"""The events of Replicate's streams: a client that joins the lines of an event gets the text back, however it is cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.jobs.stored.job import JobState
from pilotflame.runtime.plugins.replicate import stream
from receiver import job


@given(st.text(st.sampled_from("\r\n a"), max_size=40), st.integers(1, 7))
def test_the_lines_of_an_event_are_those_of_the_text(text: str, part_chars: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "_PART_CHARS", part_chars)
        told = b"".join(stream._event("output", text, 3)).decode()
    name, number, *lines = told.removesuffix("\n\n").split("\n")
    assert (name, number) == ("event: output", "id: 3")
    assert all(line.startswith("data: ") for line in lines)
    joined = "\n".join(line.removeprefix("data: ") for line in lines)
    assert joined == text.replace("\r\n", "\n").replace("\r", "\n")


def told(given: list[tuple[int, bytes]], **fields: Any) -> list[tuple[str, str, str]]:
    """Return (event, id, data) of what an encoder yields for pieces, and then for the job with `fields`."""
    encode = stream._encoder()
    text = b"".join([*encode(job(), given), *encode(job(**fields), [])]).decode()
    blocks = [block.split("\n", 2) for block in text.split("\n\n") if block]
    return [(name[7:], number[4:], data.removeprefix("data: ")) for name, number, data in blocks]


def test_pieces_and_the_end_are_events_with_increasing_numbers() -> None:
    pieces = [(1, b'"a b"'), (2, b'{"n":1}')]
    outputs = [("output", "1", "a b"), ("output", "2", '{"n":1}')]
    assert told(pieces) == outputs
    assert told(pieces, state=JobState.COMPLETED, pieces=2, output=b"[]") == [*outputs, ("done", "3", "{}")]


@pytest.mark.parametrize(
    ("fields", "events"),
    [
        ({"state": JobState.COMPLETED, "output": b'"ab"'}, [("output", "1", "ab"), ("done", "2", "{}")]),
        (
            {"state": JobState.COMPLETED, "output": b"ab", "output_type": "text/plain"},
            [("output", "1", "ab"), ("done", "2", "{}")],
        ),
        ({"state": JobState.CANCELLED}, [("done", "1", '{"reason":"canceled"}')]),
        (
            {"state": JobState.FAILED, "error": {"message": "no"}},
            [("error", "1", "no"), ("done", "2", '{"reason":"error"}')],
        ),
        ({"state": JobState.TIMED_OUT}, [("done", "1", '{"reason":"error"}')]),
        ({"state": JobState.IN_PROGRESS}, []),
    ],
)
def test_the_end_says_why(fields: dict[str, Any], events: list[tuple[str, str, str]]) -> None:
    assert told([], **fields) == events
