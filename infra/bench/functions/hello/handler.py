"""Next to no work: what the path costs is all there is. The same as in litserve_server.py."""

from typing import Any


def handler(event: Any) -> Any:
    return {"message": f"Hello, {event['name']}!"}
