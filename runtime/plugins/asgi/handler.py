"""Makes the Handler of a web app: imports the app, runs its lifespan, and calls it with requests and WebSockets."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, cast

from ....errors import HandlerImportError, HandlerSignatureError
from ....handlers.codec import InputCodec, OutputCodec
from ....handlers.contract import Context
from ....handlers.dialect import Entry
from ....handlers.failure import explain
from ....handlers.handler import Handler, HandlerKind
from .event_call import EventCall
from .http_call import App, HttpCall
from .lifespan import CONTEXT_KEY, Lifespan
from .scope import WEBSOCKET, Facts, scope_of
from .websocket_call import WebSocketCall

_INSTALL = "Add the package that provides `{}` to requirements.txt and deploy with --install."
THREADS = 16
"""Calls of a WSGI app that one worker runs at a time. Further calls wait for a thread."""


def resolve_app(root: Path, entry: Entry, _function: str = "") -> Handler:
    """Import the app that `entry` names, as `uvicorn` would with `--app-dir root`, and return its Handler.

    Raise HandlerImportError if the import fails, HandlerSignatureError if there is no such app.
    """
    app = _import_app(root, entry)
    called = AppCaller(_of_wsgi(app) if entry.dialect == "wsgi" else cast("App", app))
    return Handler(
        called.call,
        HandlerKind.ASYNC,
        InputCodec(None),
        OutputCodec(None),
        setup=called.lifespan.start if entry.dialect != "wsgi" else None,
        teardown=called.stop if entry.dialect != "wsgi" else None,
        dialect=entry.dialect,
        entry=entry.label,
        exchanges=True,
    )


def _import_app(root: Path, entry: Entry) -> Any:
    sys.path.insert(0, str(root))
    name = entry.file.removesuffix(".py").replace("/", ".")
    if not (root / entry.file).is_file():
        key = f'`{entry.dialect} = "module:app"`'
        fault = f"{entry.file} is not in the function's folder."
        raise HandlerImportError(fault, remedy=f"Name the app's module in pilotflame.toml: {key}.")
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        remedy = _INSTALL.format(error.name) if isinstance(error, ModuleNotFoundError) else ""
        raise explain(HandlerImportError, f"Importing {entry.file}", error, root, remedy=remedy) from error
    app = getattr(module, entry.name, None)
    if not callable(app):
        fault = f"{entry.file} has no app called {entry.name!r}."
        remedy = f'Name it in pilotflame.toml, as `{entry.dialect} = "{name}:NAME"`.'
        raise HandlerSignatureError(fault, remedy=remedy)
    return app


def _of_wsgi(app: Any) -> App:
    try:
        from a2wsgi import WSGIMiddleware  # noqa: PLC0415  only functions with `wsgi` need it
    except ImportError as error:
        raise HandlerImportError(
            f"A WSGI app needs a package: {error}.", remedy="Add a2wsgi to requirements.txt."
        ) from error
    return cast("App", WSGIMiddleware(app, workers=THREADS))


def _matches_below_root() -> bool:
    """Return True if the app's routes match a path without the root path, as in Starlette below 0.33 (and FastAPI below 0.107)."""
    version = getattr(sys.modules.get("starlette"), "__version__", "1.0")
    return tuple(int(part) for part in version.split(".")[:2]) < (0, 33)


class AppCaller:
    """Calls one app in one worker."""

    def __init__(self, app: App) -> None:
        self._app, self._strips = app, _matches_below_root()
        self.lifespan = Lifespan(app)

    async def call(self, event: Any, context: Context) -> Any:
        """Run a request or a WebSocket of a caller, or a request that an event describes.

        `event` is the body of a caller's request, unless the body follows in pieces.
        """
        state = self.lifespan.state.copy()
        state[CONTEXT_KEY] = context
        facts, exchange = Facts.decode(context.extra), context.exchange
        if facts is None or exchange is None:
            return await EventCall(event).run(self._app, state)
        scope = scope_of(facts, state)
        if self._strips:
            scope["path"] = scope["path"].removeprefix(scope["root_path"])
        if facts.kind == WEBSOCKET:
            return await WebSocketCall(exchange).run(self._app, scope)
        return await HttpCall(exchange, None if exchange.follows else event).run(self._app, scope)

    def stop(self, _context: Context) -> None:
        """Run the shutdown of the lifespan."""
        self.lifespan.stop()
