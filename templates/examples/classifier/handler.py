"""A text classifier: hashed words, one linear layer, requests in batches. Weights: python make_weights.py"""

import zlib
from typing import Annotated

import pilotflame
import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

LABELS = ("billing", "delivery", "praise")
WORDS = 512


class Event(BaseModel):
    text: Annotated[str, Field(min_length=1, max_length=10_000, examples=["Where is my parcel?"])]


def features(text: str) -> Tensor:
    """Return how often each hash of a word occurs: WORDS floats."""
    row = torch.zeros(WORDS)
    for word in text.lower().split():
        row[zlib.crc32(word.strip(".,!?").encode()) % WORDS] += 1
    return row


def build(context: pilotflame.Context) -> nn.Module:
    with context.snapshot.skeleton():
        model = nn.Linear(WORDS, len(LABELS))
    context.snapshot.restore(model)
    return model


@pilotflame.batch(max_size=64, example={"text": "Where is my parcel?"})
@torch.inference_mode()
def handler(events: list[Event], context: pilotflame.Context) -> list[dict[str, float]]:
    shares = context.state(torch.stack([features(event.text) for event in events])).softmax(1)
    return [dict(zip(LABELS, row, strict=True)) for row in shares.tolist()]
