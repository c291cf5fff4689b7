"""The watch of `pilotflame dev` deploys a folder now and after each change, and prints the function's log."""

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


async def watch(functions: Functions, deployment: Deployment, stop: asyncio.Event) -> None:
    """Deploy after each change until `stop` is set. If a deploy fails, the last good revision stays."""
    if deployment.path is None:
        raise ValueError("only a folder can be watched")
    changes = awatch(deployment.path, stop_event=stop)
    log: asyncio.Task[None] | None = None
    async with asyncio.TaskGroup() as tasks:
        while True:
            # Watch also during a deploy, so that no change is missed.
            change = tasks.create_task(_next(changes))
            live = await _deploy(functions, deployment)
            # All revisions write to one log.
            if log is None and live is not None:
                log = tasks.create_task(_print_log(live))
            if await change is None:
                break
        if log is not None:
            log.cancel()


async def _next(changes: AsyncGenerator[set[FileChange], None]) -> set[FileChange] | None:
    """Return the next files that changed; None when the watch has ended."""
    return await anext(changes, None)


async def _deploy(functions: Functions, deployment: Deployment) -> Live | None:
    started_s = time.monotonic()
    try:
        live = await functions.deploy(deployment)
    except (PilotflameError, OSError) as error:
        # OSError: a file may vanish while it is copied.
        _say(f"not deployed: {error}")
        if isinstance(error, PilotflameError) and (trace := error.details.get("traceback")) is not None:
            sys.stderr.write(trace)
        return None
    _say(f"{live.record.function} {live.record.revision} is live ({time.monotonic() - started_s:.1f} s)")
    for warning in live.warnings:
        _say(f"warning: {warning}")
    return live


async def _print_log(live: Live) -> None:
    async for line in live.logs.follow(100):
        sys.stderr.write(f"{line.source} | {line.text}\n")


def _say(text: str) -> None:
    sys.stderr.write(f"pilotflame: {text}\n")
