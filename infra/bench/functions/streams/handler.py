"""A stream of so many pieces of so many bytes, as fast as it is taken."""

from collections.abc import Iterator
from typing import Any


def handler(event: Any) -> Iterator[str]:
    piece = "x" * event["bytes"]
    for _ in range(event["pieces"]):
        yield piece
