"""A stream: each piece is sent when it is yielded, as a server-sent event."""

import asyncio
from collections.abc import AsyncIterator

from pydantic import BaseModel, Field


class Event(BaseModel):
    start: int = Field(3, ge=0, le=100)


async def handler(event: Event) -> AsyncIterator[dict[str, int]]:
    for left in range(event.start, -1, -1):
        yield {"left": left}
        await asyncio.sleep(0.01)
