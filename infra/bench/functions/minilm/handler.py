"""all-MiniLM-L6-v2 as a function: `{"text": "…"}` in, a list of 384 numbers out. The work is embedder.py's."""

from typing import Any

import pilotflame
from embedder import Embedder

SAMPLE = "A sentence of about the length that is usual."


def build(context: pilotflame.Context) -> Embedder:
    """Everything but the weights, once; the weights are mapped by each worker."""
    with context.snapshot.skeleton():
        embedder = Embedder(context.snapshot.path, weights=False)
    context.snapshot.restore(embedder.model, ignore=(r"position_ids$", r"^pooler\."))
    return embedder


def rehearse(context: pilotflame.Context) -> None:
    context.state.embed([SAMPLE])


@pilotflame.batch(max_size=32, example={"text": SAMPLE})
def handler(events: list[Any], context: pilotflame.Context) -> list[list[float]]:
    found: list[list[float]] = context.state.embed([event["text"] for event in events])
    return found
