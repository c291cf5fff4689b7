"""The first call: a function set up as a worker would, called once, and what it touched written down. A process of its own."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from ...errors import HandlerFailed, HandlerSetupError, PilotflameError
from ...handlers.contract import Context
from ...handlers.failure import explain
from ..link.worker_spec import WorkerSpec
from .worker import Built, configure_logging, prime
from .zygote import build

if TYPE_CHECKING:
    from ...snapshot.format.manifest import Manifest
    from ...snapshot.handle import Snapshot

DEADLINE_S = 900.0


def main() -> None:
    """`python -m pilotflame.runtime.first_call DESCRIPTOR`, with spec and event on standard input."""
    order = json.load(sys.stdin)
    try:
        manifest = _live(
            WorkerSpec.model_validate(order["spec"]), order["event"].encode("utf-8", "surrogateescape")
        )
        answer: dict[str, Any] = {"order": list(manifest.first_touch)}
    except PilotflameError as error:
        answer = {"error": error.to_wire()}
    with os.fdopen(int(sys.argv[1]), "wb", closefd=False) as stream:
        stream.write(json.dumps(answer).encode())


def _live(spec: WorkerSpec, body: bytes) -> Manifest:
    """A worker's life, as far as its first answer."""
    configure_logging()
    built = build(spec)
    snapshot = built.snapshot
    if snapshot is None:
        raise RuntimeError("a recording without a snapshot")
    snapshot.open()
    prime()
    event = built.handler.input.decode(body)
    if built.handler.kind.on_loop:
        return snapshot.record(lambda: asyncio.run(_first_call(spec, built, snapshot, event)))
    return snapshot.record(lambda: _drive(_first_call(spec, built, snapshot, event)))


def _drive(run: Coroutine[Any, Any, None]) -> None:
    """Runs what awaits nothing but its own hooks, without a loop around the handler: it may want one itself."""
    try:
        run.send(None)
    except StopIteration:
        return
    raise RuntimeError("a plain handler's run waited")


async def _first_call(spec: WorkerSpec, built: Built, snapshot: Snapshot, event: Any) -> None:
    handler, state = built.handler, built.state
    try:
        if handler.setup is not None:
            answer = handler.setup(Context(spec.function, spec.revision, state=state, snapshot=snapshot))
            if inspect.isawaitable(answer):
                answer = await answer if handler.kind.on_loop else asyncio.run(_await(answer))
            state = state if answer is None else answer
    except (Exception, SystemExit) as error:
        raise explain(HandlerSetupError, "Setting up a worker", error, spec.code) from error
    context = Context(
        spec.function, spec.revision, invocation_id="recording", state=state, snapshot=snapshot,
        deadline_s=time.monotonic() + DEADLINE_S,
    )  # fmt: skip
    try:
        await _call(built, context, event)
    except (Exception, SystemExit) as error:
        raise explain(HandlerFailed, "The handler", error, spec.code) from error


async def _call(built: Built, context: Context, event: Any) -> None:
    """One event through the handler, of whatever kind; an answer that is an exception is raised."""
    handler = built.handler
    if handler.batch is not None:
        event = [event]
        context = Context(
            context.function, context.revision, invocation_id=context.id, state=context.state,
            snapshot=context.snapshot, items=[context],
        )  # fmt: skip
    answer = handler.call(event, context) if handler.takes_context else handler.call(event)
    if handler.kind.value == "async_generator":
        async for _ in answer:
            pass
    elif handler.kind.value == "generator":
        for _ in answer:
            pass
    else:
        if handler.kind.on_loop:
            answer = await answer
        if (
            handler.batch is not None
            and answer
            and isinstance(answer, (list, tuple))
            and isinstance(answer[0], Exception)
        ):
            raise answer[0]


async def _await(awaitable: Any) -> Any:
    return await awaitable


if __name__ == "__main__":
    main()
