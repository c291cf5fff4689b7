"""An empty handler: only the cost of the path remains."""

from typing import Any


def handler(event: Any) -> Any:
    return {"message": f"Hello, {event['name']}!"}
