"""The watch of `pilotflame dev`: deploys a folder now and whenever it changes, and shows its log."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator

from watchfiles import awatch
from watchfiles.main import FileChange

from ...errors import PilotflameError
from ..functions.deploy import Deployment
from ..functions.live import Live
from ..functions.registry import Functions


async def watch(functions: Functions, order: Deployment, stop: asyncio.Event) -> None:
    """Until `stop`: each change is a deploy; one that fails is told, and the last good revision goes on."""
    if order.path is None:
        raise ValueError("only a folder can be watched")
    changes = awatch(order.path, stop_event=stop)
    following: asyncio.Task[None] | None = None
    async with asyncio.TaskGroup() as tasks:
        while True:
            # The watch runs while we deploy, the first time as well: what is edited meanwhile is not missed.
            change = tasks.create_task(_next(changes))
            following = _show_log(tasks, following, await _deploy(functions, order))
            if await change is None:
                break
        if following is not None:
            following.cancel()


async def _next(changes: AsyncGenerator[set[FileChange], None]) -> set[FileChange] | None:
    """The next files that changed; None once the watch has ended."""
    return await anext(changes, None)


async def _deploy(functions: Functions, order: Deployment) -> Live | None:
    started_s = time.monotonic()
    try:
        live = await functions.deploy(order)
    except (PilotflameError, OSError) as error:  # a file may vanish while it is copied
        _say(f"not deployed: {error}")
        if isinstance(error, PilotflameError) and (trace := error.details.get("traceback")) is not None:
            sys.stderr.write(trace)
        return None
    _say(f"{live.record.function} {live.record.revision} is live ({time.monotonic() - started_s:.1f} s)")
    for warning in live.warnings:
        _say(f"warning: {warning}")
    return live


def _show_log(
    tasks: asyncio.TaskGroup, following: asyncio.Task[None] | None, live: Live | None
) -> asyncio.Task[None] | None:
    """Follows the function's log, once: a new revision writes to the same book."""
    if following is not None or live is None:
        return following
    return tasks.create_task(_follow(live))


async def _follow(live: Live) -> None:
    async for line in live.logs.follow(100):
        sys.stderr.write(f"{line.source} | {line.text}\n")


def _say(text: str) -> None:
    sys.stderr.write(f"pilotflame: {text}\n")
