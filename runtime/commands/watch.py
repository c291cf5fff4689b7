"""Watches a function's folder for `pilotflame dev`: deploys it after each change and prints its log."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from watchfiles import awatch
from watchfiles.main import FileChange

from ...errors import PilotflameError
from ..functions.deploy import Deployment
from ..functions.live import Live
from ..functions.registry import Functions


async def watch(
    folder: Path,
    functions: Functions,
    deployment: Deployment,
    stop: asyncio.Event,
    report: Callable[[str], None],
) -> None:
    """Deploy `folder` now and after each change until `stop` is set, and print the function's log.

    `report` is called with the outcome of each deploy.
    """
    changes = awatch(folder, stop_event=stop)
    log: asyncio.Task[None] | None = None
    async with asyncio.TaskGroup() as tasks:
        changed = True
        while changed:
            # Watch during the deploy too, so that no change is missed.
            change = tasks.create_task(_any(changes))
            live = await _deploy(functions, deployment, report)
            # All revisions of a function write to the same log, so it is followed only once.
            if log is None and live is not None:
                log = tasks.create_task(_print_log(live))
            changed = await change
        if log is not None:
            log.cancel()


async def _any(changes: AsyncGenerator[set[FileChange], None]) -> bool:
    """Wait for the next change and return True. Return False if `changes` has ended."""
    return await anext(changes, None) is not None


async def _deploy(functions: Functions, deployment: Deployment, report: Callable[[str], None]) -> Live | None:
    """Deploy, and report the outcome. If it fails, return None; the previous revision stays live."""
    started_s = time.monotonic()
    try:
        live = await functions.deploy(deployment)
    except (PilotflameError, OSError) as error:
        # OSError: a file may vanish while it is copied.
        report(f"not deployed: {error}")
        sys.stderr.write(getattr(error, "details", {}).get("traceback", ""))
        return None
    report(f"{live.record.function} {live.record.revision} is live ({time.monotonic() - started_s:.1f} s)")
    for warning in live.warnings:
        report(f"warning: {warning}")
    return live


async def _print_log(live: Live) -> None:
    async for line in live.logs.follow(100):
        sys.stderr.write(f"{line.source} | {line.text}\n")
