"""Next to no work: only the cost of the path remains. The same as in litserve_server.py."""

from typing import Any


def handler(event: Any) -> Any:
    return {"message": f"Hello, {event['name']}!"}
