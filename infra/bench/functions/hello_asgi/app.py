"""A hello of FastAPI, and one of ASGI alone, for `make bench-asgi`."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

app = FastAPI()


class Person(BaseModel):
    """The body of a request."""

    name: str


@app.post("/hello")
async def hello(person: Person) -> dict[str, str]:
    return {"message": f"Hello, {person.name}!"}


async def pure(scope: Any, receive: Any, send: Any) -> None:
    """Answer every request with the same bytes, so that only the server costs time."""
    if scope["type"] != "http":
        raise TypeError("This app has neither a lifespan nor WebSockets.")
    await receive()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"24")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"message":"Hello, x!"}\n'})
