"""A stream of `pieces` pieces with `bytes` bytes each, as fast as the caller reads it."""

from collections.abc import Iterator
from typing import Any


def handler(event: Any) -> Iterator[str]:
    piece = "x" * event["bytes"]
    for _ in range(event["pieces"]):
        yield piece
