"""Frames, the wire format of a link.

A frame is `length u32 | head length u32 | kind u8 | channel u32` (little endian), then the head (a few bytes
of JSON or a packed struct) and the payload, which nothing on the way decodes. `length` counts head and
payload. A channel is one invocation on this link; channel 0 is the link itself.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, NamedTuple

import orjson

from ...errors import LinkError

HEADER = struct.Struct("<IIBI")
TIMING = struct.Struct("<ddHd")
MAX_FRAME_BYTES = 256 << 20


class FrameKind(enum.IntEnum):
    """What a frame says. Down is from the gateway, up is to the gateway.

    The two ends may be of different releases: a kind never changes its number, and 7 is not used again.
    """

    # Up: who dials in, and the token that proves it.
    HELLO = 1
    # Down: map the weights, run `setup` and become a worker.
    ACTIVATE = 2
    # Up: `setup` is done. Or import, build or setup failed, with the error as the head.
    READY = 3
    FAILED = 4
    # Up: how many groups may be in flight from now on, and how many invocations in one group.
    WINDOW = 5
    # Down. As long as the head has `more`, the following invocations run together with this one.
    INVOKE = 6
    # Up: the response of a channel, or one chunk of a stream, or the end of a stream, or the error.
    RESULT = 8
    CHUNK = 9
    END = 10
    ERROR = 11
    # Up: the invocation was never started and may run elsewhere.
    RETURNED = 12
    # Down: the caller of this channel went away.
    CANCEL = 13
    # Down: the caller has read this many chunks; as many more may be sent.
    MORE = 14
    # Both ways: finish what runs, take nothing new.
    DRAIN = 15
    # Down, to a zygote.
    FORK = 16
    # Up, from a zygote: it can fork now; the pid that a FORK became; a child ended.
    BUILT = 17
    FORKED = 18
    EXITED = 19
    # Up: a standby has done all that it can do ahead of time.
    PRIMED = 20
    # Up, from a zygote: the system refused a FORK.
    UNFORKED = 21
    # Up: the progress of a channel, as JSON in the payload. The latest counts.
    PROGRESS = 22


class Frame(NamedTuple):
    kind: int
    channel: int
    head: bytes
    payload: bytes

    def json(self) -> dict[str, Any]:
        """Return the head as JSON. Raise LinkError if it is not a JSON object."""
        try:
            head = orjson.loads(self.head) if self.head else {}
        except orjson.JSONDecodeError:
            head = None
        if not isinstance(head, dict):
            name = {kind.value: kind.name for kind in FrameKind}.get(self.kind, self.kind)
            raise LinkError(f"A {name} frame's head is not a JSON object.")
        return head


class Timing(NamedTuple):
    """What a worker measured of one invocation. `batch` is how many ran in the same call of the handler."""

    wait_s: float
    exec_s: float
    batch: int = 1
    cost: float = 1.0

    def pack(self) -> bytes:
        return TIMING.pack(*self)

    @classmethod
    def unpack(cls, head: bytes) -> Timing:
        return cls(*TIMING.unpack(head)) if len(head) == TIMING.size else cls(0.0, 0.0)


def encode(kind: int, channel: int = 0, head: bytes = b"", payload: bytes = b"") -> bytes:
    """Return one frame as bytes."""
    return HEADER.pack(len(head) + len(payload), len(head), kind, channel) + head + payload


def encode_json(kind: int, channel: int, head: dict[str, Any], payload: bytes = b"") -> bytes:
    """Return one frame whose head is JSON."""
    return encode(kind, channel, orjson.dumps(head), payload)


class FrameReader:
    """Cuts a byte stream into frames, whatever the sizes of the reads."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()
        self._needed = HEADER.size

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes.

        Raise LinkError on a frame over the limit or an inconsistent header.
        """
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        frames: list[Frame] = []
        position, size = 0, len(data)
        self._needed = HEADER.size
        while size - position >= HEADER.size:
            length, head, kind, channel = HEADER.unpack_from(data, position)
            if length > self._max_bytes or head > length:
                raise LinkError(
                    f"A frame claims {length} bytes with a head of {head}; the limit is {self._max_bytes}."
                )
            start = position + HEADER.size
            if start + length > size:
                self._needed = HEADER.size + length
                break
            position = start + length
            frames.append(Frame(kind, channel, data[start : start + head], data[start + head : position]))
        if position < size:
            self._rest += data[position:]
        return frames
