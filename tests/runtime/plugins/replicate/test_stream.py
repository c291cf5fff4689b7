"""The events of Replicate's streams: a client that joins the lines of an event gets the text back, however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.plugins.replicate import stream


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
