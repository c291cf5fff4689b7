"""The frames of HTTP/2 with which a client of gRPC begins a call whose message it does not end."""

from __future__ import annotations

from collections.abc import Iterable

_BEGIN = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_OF_HEADERS = 4
_MOST = 16_384
_PREFIX = 127


def connection() -> bytes:
    """Return what a client sends first."""
    return _BEGIN + _frame(_SETTINGS, 0, 0, b"")


def unfinished_call(
    method: str, metadata: Iterable[tuple[str, str]], size: int, sent: int, stream: int = 1
) -> bytes:
    """Return the frames of a call that announces a message of `size` bytes and sends `sent` of them.

    `sent` is at most 64 KiB, which any client may send before the server extends the window.
    """
    fields = [
        (":method", "POST"), (":scheme", "http"), (":path", f"/inference.GRPCInferenceService/{method}"), (":authority", "x"),
        ("te", "trailers"), ("content-type", "application/grpc"), *metadata,
    ]  # fmt: skip
    head = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
    body = b"\0" + size.to_bytes(4, "big") + bytes(sent)
    parts = (body[start : start + _MOST] for start in range(0, len(body), _MOST))
    return _frame(_HEADERS, _END_OF_HEADERS, stream, head) + b"".join(
        _frame(_DATA, 0, stream, part) for part in parts
    )


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _text(text: str) -> bytes:
    """Return a text of at most 254 bytes in HPACK's encoding, without compression."""
    data = text.encode()
    size = bytes((len(data),)) if len(data) < _PREFIX else bytes((_PREFIX, len(data) - _PREFIX))
    return size + data
