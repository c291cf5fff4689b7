"""Sends 1 GiB of chunk frames without credit."""

import gc
import time

from pilotflame.runtime.calls.link.connection import Link
from pilotflame.runtime.calls.link.frames import FrameKind, encode


def handler(event, context):
    yield "first"
    link = next(one for one in gc.get_objects() if type(one) is Link)
    frame = memoryview(encode(FrameKind.CHUNK, context._channel, b"", b'"' + b"x" * (1 << 20) + b'"'))
    until, left = time.monotonic() + event["s"], 1024
    while left and time.monotonic() < until:
        rest, left = frame, left - 1
        while rest and time.monotonic() < until:
            try:
                rest = rest[link.sock.send(rest) :]
            except BlockingIOError:
                time.sleep(0.001)
