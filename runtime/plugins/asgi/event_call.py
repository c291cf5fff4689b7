"""Calls a web app with an event: a request described as JSON. Jobs, queues, schedules and `pilotflame test` call apps in this way."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

import orjson
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from ....errors import BadInput, HandlerFailed
from ....foreign_json import failing_fast, loads
from ....handlers.codec import JSON_TYPE, input_error
from ....handlers.failure import cut
from .http_call import App, AsgiMessage, as_bytes
from .messages import HeaderPair
from .scope import HTTP, Facts, scope_of

_REMEDY = 'Send {"path": "/items"}, and if needed "method", "headers" and "body".'


class RequestEvent(BaseModel):
    """A request to the app. Without a method, it is a POST if it has a body, else a GET."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    path: str = Field(pattern="^/")
    """The path within the app, with the query."""
    method: str = Field("", pattern="^[A-Za-z]*$")
    headers: dict[str, str] = {}
    body: JsonValue = None
    """A text is sent as it is, and any other value as JSON."""

    def facts(self) -> Facts:
        path, _, query = self.path.partition("?")
        method = (self.method or ("GET" if self.body is None else "POST")).upper()
        given = {name.lower(): value for name, value in self.headers.items()}
        if self.body is not None and not isinstance(self.body, str):
            given.setdefault("content-type", JSON_TYPE)
        given = {"host": "localhost", "content-length": str(len(self.content())), **given}
        headers: list[HeaderPair] = [(name.encode(), value.encode()) for name, value in given.items()]
        raw_path = quote(path, safe="/%:@!$&'()*+,;=~-._")
        return Facts(HTTP, "1.1", method, "http", raw_path, query, "", headers, None, None)

    def content(self) -> bytes:
        if self.body is None:
            return b""
        return self.body.encode() if isinstance(self.body, str) else orjson.dumps(self.body)


_VALIDATOR = failing_fast(TypeAdapter(RequestEvent))


class EventCall:
    """One call of an app with an event."""

    def __init__(self, event: Any) -> None:
        """Raise BadInput if the event is no request."""
        if not isinstance(event, dict):
            raise BadInput("This function is a web app, and the input is no request.", remedy=_REMEDY)
        try:
            self._event: RequestEvent = _VALIDATOR.validate_python(event)
        except ValidationError as error:
            wrong = input_error(error)
            raise BadInput(wrong.message, remedy=_REMEDY, details=wrong.details) from None
        self._asked, self._complete = False, asyncio.Event()
        self._status, self._content_type, self._parts = 0, "", list[bytes]()

    async def run(self, app: App, state: dict[str, Any]) -> Any:
        """Return the body of the response: JSON, a text or bytes.

        Raise HandlerFailed if the app starts no response, or sends a body that is not JSON although its type is JSON. Raise it
        also if the status is 400 or more; then `details` has the status and the body.
        """
        facts = self._event.facts()
        await app(scope_of(facts, state), self._receive, self._send)
        if not self._status:
            raise HandlerFailed("The app returned without starting a response.")
        body = self._decoded(b"".join(self._parts))
        if self._status >= 400:
            what = f"The app responded with status {self._status} to {facts.method} {self._event.path}"
            text = body if isinstance(body, str) else json.dumps(body, default=repr)
            details = {"status": self._status, "body": cut(text)}
            raise HandlerFailed(f"{what}: {text[:200]}", details=details)
        return body

    def _decoded(self, body: bytes) -> Any:
        kind = self._content_type.partition(";")[0].strip().lower()
        if kind == JSON_TYPE or kind.endswith("+json"):
            try:
                return loads(body) if body else None
            except orjson.JSONDecodeError as error:
                raise HandlerFailed(
                    f"The app's response has the type {kind}, but is not JSON: {error}."
                ) from None
        return body.decode("utf-8", "replace") if kind.startswith("text/") or not body else body

    async def _receive(self) -> AsgiMessage:
        if self._asked:
            # An event has no caller who could disconnect, so wait until the response is complete.
            await self._complete.wait()
            return {"type": "http.disconnect"}
        self._asked = True
        return {"type": "http.request", "body": self._event.content(), "more_body": False}

    async def _send(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            self._status = int(message["status"])
            for name, value in message.get("headers", ()):
                if name.lower() == b"content-type":
                    self._content_type = value.decode("latin-1")
        elif message["type"] == "http.response.body":
            self._parts.append(as_bytes(message.get("body", b"")))
            if not message.get("more_body", False):
                self._complete.set()
