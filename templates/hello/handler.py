"""A greeting: a small function with a validated input."""

from pydantic import BaseModel, Field


class Greeting(BaseModel):
    """The input. Any other input is refused with status 422 and the path of the invalid field."""

    name: str = Field("world", max_length=100)
    excited: bool = False


def handler(event: Greeting) -> dict[str, str]:
    return {"greeting": f"Hello, {event.name}{'!' if event.excited else '.'}"}
