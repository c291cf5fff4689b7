"""Takes items of several types."""

from pydantic import BaseModel


class Event(BaseModel):
    items: list[int | float | list[int] | dict[str, int]]


def handler(event: Event):
    return len(event.items)
