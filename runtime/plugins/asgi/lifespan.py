"""Runs the lifespan of a web app: its startup when a worker is set up, and its shutdown when the worker ends."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from ....errors import HandlerFailed
from ....handlers.contract import Context
from .http_call import App, AsgiMessage

# Less than 30 s, because the gateway kills a worker that has not exited 30 s after its last call.
SHUTDOWN_S = 25.0
CONTEXT_KEY = "pilotflame"
"""The name under which an app finds its Context, in `scope["state"]` and in `app.state`."""


class Lifespan:
    """The lifespan of one app in one worker. All methods but `stop` run on the worker's event loop."""

    def __init__(self, app: App) -> None:
        self.state: dict[str, Any] = {}
        """What the startup has put into the state. Each request gets a copy."""
        self._app = app
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = False
        self._failure: str | None = None
        self._started, self._stopping, self._stopped = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def start(self, context: Context) -> None:
        """Run the startup. Raise HandlerFailed, or the app's error, if it fails.

        If the app raises before it asks for a message, it has no lifespan. That is not a failure.
        """
        self._loop = asyncio.get_running_loop()
        self.state[CONTEXT_KEY] = context
        own = getattr(self._app, "state", None)
        if own is not None:
            # Put the Context into `app.state`, too: frameworks call an app's lifespan function with the app, not with the scope.
            setattr(own, CONTEXT_KEY, context)
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._on_done)
        await self._started.wait()
        if self._failure is not None:
            raise HandlerFailed(f"The startup of the app failed: {self._failure or 'it gave no reason'}.")
        if self._task.done() and self._asked and (error := self._task.exception()) is not None:
            raise error

    def stop(self) -> None:
        """Run the shutdown, and wait for its end. Do not call this on the thread of the event loop."""
        if self._loop is not None and self._task is not None:
            asyncio.run_coroutine_threadsafe(self._stop(self._task), self._loop).result(SHUTDOWN_S + 1)

    async def _stop(self, task: asyncio.Task[None]) -> None:
        self._stopping.set()
        done, _ = await asyncio.wait([task], timeout=SHUTDOWN_S)
        if not done:
            sys.stderr.write(f"the shutdown of the app took longer than {SHUTDOWN_S:g} s\n")
            task.cancel()
        elif (error := task.exception()) is not None and self._asked:
            raise error

    async def _run(self) -> None:
        scope = {
            "type": "lifespan",
            "asgi": {"version": "3.0", "spec_version": "2.0"},
            "state": self.state,
        }
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> AsgiMessage:
        if not self._asked:
            self._asked = True
            return {"type": "lifespan.startup"}
        await self._stopping.wait()
        return {"type": "lifespan.shutdown"}

    async def _send(self, message: AsgiMessage) -> None:
        kind = message["type"]
        if kind == "lifespan.startup.failed":
            self._failure = str(message.get("message", ""))
            self._started.set()
        elif kind == "lifespan.startup.complete":
            self._started.set()
        elif kind == "lifespan.shutdown.failed":
            sys.stderr.write(f"the shutdown of the app failed: {message.get('message', '')}\n")
        elif kind != "lifespan.shutdown.complete":
            raise RuntimeError(f"Unexpected ASGI message {kind!r} in the lifespan.")

    def _on_done(self, _task: asyncio.Task[None]) -> None:
        self._started.set()
