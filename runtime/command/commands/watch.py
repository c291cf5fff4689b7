"""Watches a function's folder for `pilotflame dev`. Deploys the function after each change and prints its log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from watchfiles import awatch
from watchfiles.main import FileChange

from ....errors import PilotflameError
from ...node.functions.deploy import Deployment
from ...node.functions.live import Live
from ...node.functions.rollouts import Rollouts
from ..client import display

SHOWN_CHANGES = 3
Say = Callable[[str], None]


async def watch(folder: Path, rollouts: Rollouts, deployment: Deployment, stop: asyncio.Event) -> None:
    """Deploy `folder` now and after each change until `stop` is set, and print the function's log."""
    changes = awatch(folder, stop_event=stop)
    say = _speaker(folder, rollouts)
    log: asyncio.Task[None] | None = None
    async with asyncio.TaskGroup() as tasks:
        changed: list[str] | None = []
        while changed is not None:
            # Start to wait for changes before the deploy, so that no change during the deploy is missed.
            change = tasks.create_task(_any(changes))
            live = await _deploy(rollouts, deployment, say, stop)
            # All revisions of a function write to the same log. So follow the log only once.
            if log is None and live is not None:
                log = tasks.create_task(_print_log(live, say))
            if (changed := await change) is not None:
                say(f"pilotflame: changed: {', '.join(sorted(changed))}")
        if log is not None:
            log.cancel()


async def _any(changes: AsyncGenerator[set[FileChange], None]) -> list[str] | None:
    """Wait for the next changes, and return the paths of some changed files. Return None if `changes` has ended."""
    found = await anext(changes, None)
    return None if found is None else sorted({path for _, path in found})[:SHOWN_CHANGES]


def _speaker(folder: Path, rollouts: Rollouts) -> Say:
    """Return a function that prints a text on stderr. In the text, it replaces paths of deployed copies by `folder`."""
    copies = rollouts.functions.store.copies

    def say(text: str) -> None:
        display.say(copies.sub(lambda _match: f"{folder}/", text))

    return say


async def _deploy(rollouts: Rollouts, deployment: Deployment, say: Say, stop: asyncio.Event) -> Live | None:
    """Deploy, and print the outcome. If it fails, return None; the previous revision stays live."""
    started_s = time.monotonic()
    try:
        live = await rollouts.deploy(deployment)
    except (PilotflameError, OSError, RuntimeError) as error:
        # Print no error after Ctrl-C, which ends the processes and threads that the deploy uses.
        if stop.is_set():
            return None
        if isinstance(error, RuntimeError):
            raise
        # The deploy raises OSError if a file vanishes while it is copied.
        say(f"pilotflame: not deployed: {error}")
        if isinstance(error, PilotflameError) and error.trace:
            say(display.function_trace(error.trace))
        return None
    name, elapsed_s = f"{live.record.function} {live.record.revision}", time.monotonic() - started_s
    say(f"pilotflame: {name} is live ({elapsed_s:.1f} s)")
    display.warn(live.warnings)
    return live


async def _print_log(live: Live, say: Say) -> None:
    async for line in live.logs.follow(100):
        say(f"{line.source} | {line.text}")
