"""Sends its answer word by word: a generator's pieces reach the caller as they are made."""

import time
from collections.abc import Iterator

from pilotflame import Context
from pydantic import BaseModel, Field


class Prompt(BaseModel):
    text: str = Field(max_length=10_000)
    delay_ms: int = Field(20, ge=0, le=1000, description="Pause before each word, as a model thinks.")


def handler(event: Prompt, context: Context) -> Iterator[str]:
    for word in event.text.split():
        if context.cancelled:  # nobody listens any more: make no more words
            return
        time.sleep(event.delay_ms / 1000)
        yield word
