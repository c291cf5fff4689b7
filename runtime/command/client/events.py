"""Parses the streams that a gateway answers: lines, server-sent events, and the pieces of a function's output."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from ....errors import GatewayError, PilotflameError


def split_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a response, split at line feeds only.

    httpx's `iter_lines` also splits at U+2028, which JSON may contain.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode()
    if rest:
        yield rest.decode()


def parse_events(chunks: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Yield (name, data) of each server-sent event. Drop the last event if the empty line after it is missing."""
    name, data = "message", list[str]()
    for line in split_lines(chunks):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                yield name, "\n".join(data)
            name, data = "message", []
        elif field == "event":
            name = value
        elif field == "data":
            data.append(value)


def output_pieces(chunks: Iterable[bytes]) -> Iterator[Any]:
    """Yield the pieces of an output. Raise the error that ends the stream, or GatewayError if the stream breaks off."""
    for event, data in parse_events(chunks):
        if event == "output":
            yield json.loads(data)
        elif event == "error":
            raise PilotflameError.from_wire(json.loads(data))
        elif event == "completed":
            return
    raise GatewayError("The stream broke off before its end.", remedy="Call again.")
