"""Watches a function's folder for `pilotflame dev`: deploys it after each change and prints its log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from watchfiles import awatch
from watchfiles.main import FileChange

from ...errors import PilotflameError
from ..functions.deploy import Deployment
from ..functions.live import Live
from ..functions.registry import Functions
from . import display


async def watch(folder: Path, functions: Functions, deployment: Deployment, stop: asyncio.Event) -> None:
    """Deploy `folder` now and after each change until `stop` is set, and print the function's log."""
    changes = awatch(folder, stop_event=stop)
    log: asyncio.Task[None] | None = None
    async with asyncio.TaskGroup() as tasks:
        changed = True
        while changed:
            # Watch during the deploy too, so that no change is missed.
            change = tasks.create_task(_any(changes))
            live = await _deploy(functions, deployment)
            # All revisions of a function write to the same log, so it is followed only once.
            if log is None and live is not None:
                log = tasks.create_task(_print_log(live))
            changed = await change
        if log is not None:
            log.cancel()


async def _any(changes: AsyncGenerator[set[FileChange], None]) -> bool:
    """Wait for the next change and return True. Return False if `changes` has ended."""
    return await anext(changes, None) is not None


async def _deploy(functions: Functions, deployment: Deployment) -> Live | None:
    """Deploy, and print the outcome. If it fails, return None; the previous revision stays live."""
    started_s = time.monotonic()
    try:
        live = await functions.deploy(deployment)
    except (PilotflameError, OSError) as error:
        # OSError: a file may vanish while it is copied.
        display.say(f"pilotflame: not deployed: {error}")
        if isinstance(error, PilotflameError) and error.trace:
            display.say(display.function_trace(error.trace))
        return None
    name, elapsed_s = f"{live.record.function} {live.record.revision}", time.monotonic() - started_s
    display.say(f"pilotflame: {name} is live ({elapsed_s:.1f} s)")
    display.warn(live.warnings)
    return live


async def _print_log(live: Live) -> None:
    async for line in live.logs.follow(100):
        display.say(f"{line.source} | {line.text}")
