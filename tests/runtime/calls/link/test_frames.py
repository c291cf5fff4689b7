"""Frames: they are read from any split of the stream, headers have limits, and the numbers of the wire format stay."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import LinkError
from pilotflame.runtime.calls.link.frames import (
    HEADER,
    MAX_FRAME_BYTES,
    Frame,
    FrameKind,
    FrameReader,
    Timing,
    encode,
    encode_json,
)

FRAMES = st.builds(
    Frame, st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=40), st.binary(max_size=200)
)


@given(st.lists(FRAMES, max_size=8), st.integers(0, 250), st.data())
def test_any_split_of_the_stream_gives_the_same_frames(
    frames: list[Frame], large_bytes: int, data: st.DataObject
) -> None:
    stream = b"".join(encode(*frame) for frame in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    reader = FrameReader(large_bytes=large_bytes)
    found: list[Frame] = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[begin:end])
    assert found == frames


@given(st.lists(FRAMES, min_size=1, max_size=3), st.integers(0, 250))
def test_a_frame_comes_out_with_its_last_byte_and_not_before(frames: list[Frame], large_bytes: int) -> None:
    reader = FrameReader(large_bytes=large_bytes)
    ends = []
    position = 0
    for frame in frames:
        position += len(encode(*frame))
        ends.append(position)
    seen = 0
    for index, byte in enumerate(b"".join(encode(*frame) for frame in frames), start=1):
        seen += len(reader.feed(bytes([byte])))
        assert seen == sum(end <= index for end in ends)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(10, 1000))
def test_an_impossible_header_is_refused_once_it_is_complete(length: int, head: int, limit: int) -> None:
    header = HEADER.pack(length, head, 1, 0)
    reader = FrameReader(limit)
    assert reader.feed(header[:-1]) == []
    if length > limit or head > length:
        with pytest.raises(
            LinkError, match=f"claims {length} bytes with a head of {head}; the limit is {limit}"
        ):
            reader.feed(header[-1:])
    else:
        assert len(reader.feed(header[-1:])) == (length == 0)


def test_a_head_has_a_limit_of_its_own() -> None:
    reader = FrameReader(max_head_bytes=10)
    assert reader.feed(encode(1, 0, b"x" * 10, b"y" * 100))[0].payload == b"y" * 100
    with pytest.raises(LinkError, match="10 for the head"):
        reader.feed(encode(1, 0, b"x" * 11)[: HEADER.size])


def test_the_limit_itself_is_allowed() -> None:
    assert FrameReader(10).feed(encode(1, 0, b"abc", b"defghij"))[0].payload == b"defghij"
    with pytest.raises(LinkError):
        FrameReader(10).feed(encode(1, 0, b"abc", b"defghijk"))
    with pytest.raises(LinkError):
        FrameReader().feed(HEADER.pack(MAX_FRAME_BYTES + 1, 0, 1, 0))


def test_a_head_is_json_or_an_error() -> None:
    (frame,) = FrameReader().feed(encode_json(FrameKind.READY, 0, {"window": 3}, b"rest"))
    assert (frame.json(), frame.payload) == ({"window": 3}, b"rest")
    assert Frame(FrameKind.READY, 0, b"", b"").json() == {}
    for head in (b"{", b"[1]", b"\xff", b"3", b'{"a":[' + b"[]," * 700_000 + b"3]}"):
        with pytest.raises(LinkError, match="READY frame's head is not a JSON object"):
            Frame(FrameKind.READY, 0, head, b"").json()
    with pytest.raises(LinkError, match="200"):
        Frame(200, 0, b"{", b"").json()


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 2**16 - 1), st.floats(0, 1e9))
def test_timing_round_trip(wait_s: float, exec_s: float, batch: int, cost: float) -> None:
    timing = Timing(wait_s, exec_s, batch, cost)
    assert Timing.unpack(timing.pack()) == timing


def test_a_head_that_is_no_timing_is_zero() -> None:
    assert Timing.unpack(b"short") == Timing(0.0, 0.0, 1, 1.0)


def test_the_kinds_are_a_wire_format() -> None:
    """A kind never changes its number, because the two ends of a link may be of different releases."""
    assert {kind.name: kind.value for kind in FrameKind} == {
        "HELLO": 1, "ACTIVATE": 2, "READY": 3, "FAILED": 4, "WINDOW": 5, "INVOKE": 6, "RESULT": 8,
        "CHUNK": 9, "END": 10, "ERROR": 11, "RETURNED": 12, "CANCEL": 13, "MORE": 14, "DRAIN": 15, "FORK": 16,
        "BUILT": 17, "FORKED": 18, "EXITED": 19, "PRIMED": 20, "UNFORKED": 21, "PROGRESS": 22, "METRICS": 24, "PARK": 25, "UNPARK": 26, "PARKED": 27, "COPIED": 28, "POSITION": 29, "BUILD": 30, "NEED": 31, "HELD": 32, "INPUT": 33, "INPUT_END": 34, "READ": 35, "SIGNAL": 23, "ASK_BACK": 36,
    }  # fmt: skip
    assert HEADER.size == struct.calcsize("<IIBI") == 13
