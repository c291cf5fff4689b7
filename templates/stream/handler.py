"""A stream of words: each item that the generator yields reaches the caller at once."""

import time
from collections.abc import Iterator

from pilotflame import Context
from pydantic import BaseModel, Field


class Prompt(BaseModel):
    text: str = Field(max_length=10_000)
    delay_ms: int = Field(20, ge=0, le=1000, description="Pause before each word.")


def handler(event: Prompt, context: Context) -> Iterator[str]:
    for word in event.text.split():
        # The caller has disconnected.
        if context.cancelled:
            return
        time.sleep(event.delay_ms / 1000)
        yield word
