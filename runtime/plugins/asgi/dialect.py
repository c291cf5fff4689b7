"""Recognises web apps.

A web app is an object `app` that FastAPI, Starlette or Flask has made, or the app that the key `asgi` or `wsgi` in
pilotflame.toml names.
"""

from __future__ import annotations

from typing import ClassVar

from ....handlers.dialect import OWN_NAME, Dialect
from ....handlers.source_file import SourceFile

APP = "app"
CONCURRENCY = 100
"""By default, one worker serves at most this many requests and WebSockets at a time."""


class AsgiDialect(Dialect):
    """Apps that follow ASGI, such as those of FastAPI, Starlette, Litestar, Quart and Django."""

    name: ClassVar = "asgi"
    title: ClassVar = "ASGI"
    resolver: ClassVar = "pilotflame.runtime.plugins.asgi.handler:resolve_app"
    order: ClassVar = 90
    short_key: ClassVar = "asgi"
    concurrency: ClassVar = CONCURRENCY
    message: ClassVar = (
        'a request to the app: {"path": "/items"}, and if needed "method", "headers" and "body"'
    )
    makers: ClassVar = frozenset({"fastapi.FastAPI", "starlette.applications.Starlette"})
    """The calls that make an app."""

    def find(self, file: str, source: SourceFile) -> str | None:
        found = APP in source.arity and OWN_NAME not in source.arity and bool(self.makers & source.calls)
        return APP if found else None

    def default_name(self, source: SourceFile | None) -> str:
        return APP


class WsgiDialect(AsgiDialect):
    """Apps that follow WSGI, such as those of Flask. The package a2wsgi runs them in threads."""

    name: ClassVar = "wsgi"
    title: ClassVar = "WSGI"
    order: ClassVar = 91
    short_key: ClassVar = "wsgi"
    makers: ClassVar = frozenset({"flask.Flask"})


ASGI, WSGI = AsgiDialect(), WsgiDialect()
