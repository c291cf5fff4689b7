"""The two handlers of `make bench-warm` as peers' servers load them: the very files that our functions run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FUNCTIONS = Path(__file__).resolve().parents[1] / "functions"
Work = Callable[[list[Any]], list[Any]]


def load(handler: str, model: str, threads: int) -> Work:
    """A callable from a list of events to a list of answers, ready to be called."""
    sys.path.insert(0, str(FUNCTIONS / handler))
    if handler == "sleep":
        import curve  # noqa: PLC0415

        answer: Work = curve.answer
        return answer
    from embedder import Embedder  # noqa: PLC0415

    embedder = Embedder(model, threads=threads)

    def embed(events: list[Any]) -> list[Any]:
        found: list[Any] = embedder.embed([event["text"] for event in events])
        return found

    embed([{"text": "A sentence of about the length that is usual."}])
    return embed
