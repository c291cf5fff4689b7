"""Greets whom it is told to greet: the smallest function with a checked input."""

from pydantic import BaseModel, Field


class Greeting(BaseModel):
    """What a caller sends. Anything else is answered with 422 and the path of what does not fit."""

    name: str = Field("world", max_length=100)
    excited: bool = False


def handler(event: Greeting) -> dict[str, str]:
    return {"greeting": f"Hello, {event.name}{'!' if event.excited else '.'}"}
