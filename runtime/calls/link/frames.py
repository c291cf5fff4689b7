"""Encodes and decodes frames, the messages of a link.

A frame is `length u32 | head length u32 | kind u8 | channel u32` (little endian), then the head (a few bytes of JSON or
a packed struct), then the payload. The link does not interpret the payload. `length` is the length of head and payload
together. The channel is the number of an invocation on this link. Frames that do not belong to an invocation have
channel 0, except PARK and PARKED.
"""

from __future__ import annotations

import enum
import io
import struct
from typing import Any, NamedTuple

import orjson

from ....errors import LinkError, OutputTooLarge
from ....foreign_json import excess

HEADER = struct.Struct("<IIBI")
TIMING = struct.Struct("<ddHd")
MAX_FRAME_BYTES = 256 << 20
# The payload of a longer frame is collected in a buffer of its own, which need not be copied once the frame has arrived.
LARGE_BYTES = 1 << 20
# The largest payload: the rest of a frame is for its head.
MAX_PAYLOAD_BYTES = 255 << 20
MAX_HEAD_BYTES = 4 << 20
"""The longest head that the gateway reads. It parses heads on its event loop, which a long head from a container would block."""
MAX_ERROR_BYTES = 256 << 10
"""The longest error of a call."""


class FrameKind(enum.IntEnum):
    """The kind of a frame. "Down" frames are sent by the gateway, "up" frames are sent to it.

    The two ends may have different releases, so a kind never changes its number. The number 7 belonged to a
    kind that no longer exists and must not be used again.
    """

    # Up: the first frame of a connection, with the role of the process and its token.
    HELLO = 1
    # Down: map the weights, run `setup` and become a worker.
    ACTIVATE = 2
    # Up. READY: `setup` is done. FAILED: import, build or setup failed, and the head is the error.
    READY = 3
    FAILED = 4
    # Up: how many groups the gateway may send to the worker at a time ("window"). If these numbers changed, the head
    # also has how many groups the worker runs at a time ("slots"), and how many invocations a group may have ("limit").
    # With "call", the head also reports that the handler is called again for the group of the channel in "call".
    WINDOW = 5
    # Down: run an invocation. The head's "more" is the number of following invocations in the same group.
    INVOKE = 6
    # Up: the response of an invocation, one chunk of a stream, the end of a stream, or the error.
    RESULT = 8
    CHUNK = 9
    END = 10
    ERROR = 11
    # Up: the invocation was never started and may run on another worker.
    RETURNED = 12
    # Down: the caller of this invocation went away, or its time limit passed.
    CANCEL = 13
    # Down: the caller has read more chunks; the head has their "count". They no longer count against the stream's
    # credit.
    MORE = 14
    # Down: finish the running invocations; no more follow. Up: send no more invocations, and confirm with DRAIN.
    DRAIN = 15
    # Down, to a zygote: fork a child.
    FORK = 16
    # Up, from a zygote. BUILT: the zygote can fork now. FORKED: the pid of a new child. EXITED: a child has ended.
    BUILT = 17
    FORKED = 18
    EXITED = 19
    # Up: a standby has done everything that is possible before ACTIVATE. If it has rehearsed, the head has the bytes
    # that torch's allocator keeps of each GPU ("reserved", as in PARKED).
    PRIMED = 20
    # Up, from a zygote: the operating system refused to fork, or to make the child's folder.
    UNFORKED = 21
    # Up: the progress of an invocation, as JSON in the payload. It replaces earlier progress.
    PROGRESS = 22
    # Down, to a zygote: send the signal in the head to the child with the pid in the head.
    SIGNAL = 23
    # Up: the metrics of an invocation, as JSON in the payload. They replace earlier metrics.
    METRICS = 24
    # Down, to a worker without invocations. PARK: free the memory of devices, and report the freed bytes with PARKED.
    # UNPARK: bring the weights back. An INVOKE brings them back, too. The channel of a PARK frame is the number of PARK frames so far.
    PARK = 25
    UNPARK = 26
    # Up: the head has how many bytes were freed ("freed_bytes"), and how many bytes torch's allocator keeps of each GPU
    # that the process sees, in torch's order ("reserved"). The channel is the number of the PARK that this frame
    # answers.
    PARKED = 27
    # Up: the weights of a snapshot are on a device now. The head has the form of an element of "copies" in the head of
    # READY.
    COPIED = 28
    # Up, from a zygote that imports or builds: its position in the code (see `handlers/failure.py`).
    POSITION = 29
    # Down: import and build the handler. The head has the function's secrets. It is the first frame that a zygote, or a
    # spawned worker, gets.
    BUILD = 30
    # Up: the worker needs the adapter with the "name" in the head, which is fetched on use.
    NEED = 31
    # Down: the answer to NEED. The files of the adapter "name" can be mapped, and all their bytes arrive within "weights_s"
    # seconds. If the fetch has failed, the head has the "error" instead.
    HELD = 32
    # Down: a piece of the input of a running invocation, in the payload. INPUT_END: the last piece, which may be empty.
    INPUT = 33
    INPUT_END = 34
    # Up: the handler has read pieces of the input; the head has their "count". The first READ of an invocation has the
    # count 0. The gateway sends no piece before this READ, so an invocation that is given back has lost no piece.
    READ = 35
    # Down: give back the invocations that wait for a slot, each with RETURNED, because a running call is late.
    ASK_BACK = 36


class Frame(NamedTuple):
    kind: int
    channel: int
    head: bytes
    payload: bytes

    def json(self) -> dict[str, Any]:
        """Return the head as JSON. Raise LinkError if the head is not a JSON object, or has too many values."""
        try:
            head = {} if not self.head else None if excess(self.head) else orjson.loads(self.head)
        except orjson.JSONDecodeError:
            head = None
        if not isinstance(head, dict):
            name = {kind.value: kind.name for kind in FrameKind}.get(self.kind, self.kind)
            raise LinkError(f"A {name} frame's head is not a JSON object.")
        return head


class Timing(NamedTuple):
    """What a worker measured about one invocation. `batch` counts the invocations of its handler call."""

    wait_s: float
    exec_s: float
    batch: int = 1
    cost: float = 1.0

    def pack(self) -> bytes:
        return TIMING.pack(*self)

    @classmethod
    def unpack(cls, head: bytes) -> Timing:
        return cls(*TIMING.unpack(head)) if len(head) == TIMING.size else cls(0.0, 0.0)


def check_output(payload: bytes) -> None:
    """Raise OutputTooLarge if one frame cannot hold the payload. The gateway would end a link with a longer frame."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        sizes = f"{-(-len(payload) >> 20)} MiB, and a worker can send {MAX_PAYLOAD_BYTES >> 20} MiB at once"
        remedy = "Stream it in smaller pieces from a generator, or store it and return its address."
        raise OutputTooLarge(f"The output has {sizes}.", remedy=remedy)


def encode(kind: int, channel: int = 0, head: bytes = b"", payload: bytes = b"") -> bytes:
    """Return one frame as bytes."""
    return HEADER.pack(len(head) + len(payload), len(head), kind, channel) + head + payload


def encode_json(kind: int, channel: int, head: dict[str, Any], payload: bytes = b"") -> bytes:
    """Return one frame whose head is JSON."""
    return encode(kind, channel, orjson.dumps(head), payload)


class FrameReader:
    """Cuts a byte stream into frames. A read may end anywhere in a frame."""

    def __init__(
        self, max_bytes: int = MAX_FRAME_BYTES, large_bytes: int = LARGE_BYTES, max_head_bytes: int = MAX_FRAME_BYTES
    ) -> None:  # fmt: skip
        self._max_bytes, self._large_bytes, self._max_head_bytes = max_bytes, large_bytes, max_head_bytes
        self._rest = bytearray()
        self._needed = HEADER.size
        self._large: _LargeFrame | None = None
        self._fault: LinkError | None = None

    def check(self) -> None:
        """Raise LinkError if `feed` has met an invalid frame, after which nothing can be read."""
        if self._fault is not None:
            raise self._fault

    @property
    def missing(self) -> int:
        """How many bytes are missing from the next frame, or from its header if the header is incomplete."""
        return self._large.missing if self._large is not None else self._needed - len(self._rest)

    def feed(self, data: bytes) -> list[Frame]:
        """Add bytes and return the complete frames. Raise LinkError if a frame is too long or inconsistent.

        Complete frames before an invalid frame are returned first. Then `check` raises the error.
        """
        if self._fault is not None:
            raise self._fault
        frames: list[Frame] = []
        if self._large is not None:
            data = self._large.add(data)
            if self._large.missing:
                return []
            frames.append(self._large.frame())
            self._large = None
        elif self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        position = self._cut(data, frames)
        if position < len(data) and self._large is None:
            self._rest += data[position:]
        return frames

    def _cut(self, data: bytes, frames: list[Frame]) -> int:
        """Append the complete frames in `data`, and return the position after them."""
        position, size = 0, len(data)
        self._needed = HEADER.size
        while size - position >= HEADER.size:
            length, head, kind, channel = HEADER.unpack_from(data, position)
            if length > self._max_bytes or head > min(length, self._max_head_bytes):
                claim = f"A frame claims {length} bytes with a head of {head}"
                limits = f"the limit is {self._max_bytes}, and {self._max_head_bytes} for the head"
                self._fault = LinkError(f"{claim}; {limits}.")
                if not frames:
                    raise self._fault
                return size
            start = position + HEADER.size
            if start + length > size:
                self._needed = HEADER.size + min(length, max(head, self._large_bytes))
                if length > self._large_bytes and start + head <= size:
                    self._large = _LargeFrame(kind, channel, data[start : start + head], length - head)
                    self._large.add(data[start + head :])
                break
            position = start + length
            frames.append(Frame(kind, channel, data[start : start + head], data[start + head : position]))
        return position


class _LargeFrame:
    """A frame that arrives in parts. Its payload is not copied at the end."""

    def __init__(self, kind: int, channel: int, head: bytes, size: int) -> None:
        self._kind, self._channel, self._head = kind, channel, head
        # `BytesIO.getvalue` does not copy if nothing else has the buffer.
        self._payload, self.missing = io.BytesIO(), size

    def add(self, data: bytes) -> bytes:
        """Add bytes, and return the bytes that follow the frame."""
        own, after = (
            (data, b"") if len(data) <= self.missing else (data[: self.missing], data[self.missing :])
        )
        self._payload.write(own)
        self.missing -= len(own)
        return after

    def frame(self) -> Frame:
        return Frame(self._kind, self._channel, self._head, self._payload.getvalue())
