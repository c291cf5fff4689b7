"""Runs the gateway's process: serves until a signal, then drains."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import uvloop

from ..errors import GatewayError, PilotflameError
from .command.commands.watch import watch
from .front.api.standalone import Standalone
from .front.listening.open_connections import raise_open_files
from .ground.settings.function_settings import FunctionSettings, read_settings
from .ground.settings.gateway_settings import GatewaySettings
from .node.functions.deploy import Deployment
from .node.functions.rollouts import Rollouts
from .startup.server import Server, serve
from .startup.signals import handled

LOG = logging.getLogger(__name__)
# A garbage collection starts after this number of new objects. A request creates about twenty objects that the
# collector counts. Nearly all of them are freed when the request ends, so frequent collections would find nothing.
YOUNG_OBJECTS = 20_000
# Each block of this size or more gets a mapping of its own, which goes back to the kernel when the block is freed. By default,
# glibc raises this size to that of the largest block that was freed, at most 32 MiB. Then bodies lie in the heap, where a small
# block behind them keeps their memory from going back to the kernel.
MAPPED_BYTES = 128 << 10
_M_MMAP_THRESHOLD = -3
# While the event loop is busy, another thread waits for this time until it gets the interpreter. By default, this is 5 ms.
# A stored job waits several times for the thread of its database.
SWITCH_S = 1e-3


class Stop(asyncio.Event):
    """An event that is set when the process must end, because of a signal or because it cannot serve."""

    def __init__(self, *, of_terminal: bool) -> None:
        """`of_terminal` is True if the process ends when its terminal closes."""
        super().__init__()
        self.signal: int | None = None
        self.error: PilotflameError | None = None
        self.server: Server | None = None
        self._of_terminal = of_terminal

    def by_signal(self, number: int) -> None:
        self.signal = number
        self.set()

    def by_hangup(self) -> None:
        """Handle SIGHUP: end a process that ends with its terminal, which has closed. Otherwise, read the certificate again."""
        if self._of_terminal:
            self.by_signal(signal.SIGHUP)
        elif self.server is not None:
            self.server.reload()

    def by_error(self, error: PilotflameError) -> None:
        self.error = error
        self.set()


def run(
    settings: GatewaySettings,
    *,
    on_listening: Callable[[str], None],
    folder: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    standalone: bool = False,
) -> None:
    """Serve until a signal that drains, then drain (startup/signals.py). A second such signal ends the process at once.

    Once the gateway accepts requests, this calls `on_listening` with the gateway's URL. If `folder` is given, it is
    deployed at the start and after each change. With `standalone`, `folder` is the only function and is deployed only
    once. Raise GatewayError if the gateway cannot start, and the error of the deploy if a standalone function cannot be
    deployed.
    """
    if folder is not None and not folder.is_dir():
        raise GatewayError(f"{folder} is not a folder.", remedy="Give the folder that holds handler.py.")
    deployment = Deployment(path=folder, overrides=overrides or {}, standalone=standalone)
    alone: FunctionSettings | None = None
    if folder is not None and standalone:
        alone = read_settings(folder, overrides=overrides, standalone=True)

    # Not every C library has `mallopt`.
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)

    async def run_until_signal() -> None:
        # `dev` ends with its terminal.
        stop = Stop(of_terminal=folder is not None and not standalone)
        with handled(stop.by_signal, stop.by_hangup):
            async with serve(settings, alone) as server:
                stop.server = server
                # Exempt all objects that exist now from garbage collection, and collect new objects less often.
                gc.collect()
                gc.freeze()
                gc.set_threshold(YOUNG_OBJECTS)
                on_listening(server.url)
                if server.standalone is not None:
                    opening = _open(server.standalone, server.node.rollouts, deployment, stop)
                    server.standalone.follow(server.tasks.create_task(opening, name="deploy"))
                elif folder is not None:
                    follow = functools.partial(watch, folder, server.node.rollouts, deployment, stop)
                    server.tasks.keep(follow, name="watch")
                await stop.wait()
                if stop.signal == signal.SIGTERM:
                    server.leave()
                    await asyncio.sleep(server.lame_duck_s)
        if stop.error is not None:
            raise stop.error

    raise_open_files()
    sys.setswitchinterval(SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_until_signal())


async def _open(standalone: Standalone, rollouts: Rollouts, deployment: Deployment, stop: Stop) -> None:
    """Deploy the only function. If the deploy fails, end the process, so that the platform starts it again."""
    try:
        live = await rollouts.deploy(deployment)
    except PilotflameError as error:
        return stop.by_error(error)
    except Exception as error:
        stop.by_error(GatewayError(f"The function cannot be deployed: {type(error).__name__}: {error}."))
        raise
    for warning in live.warnings:
        LOG.warning(warning)
    return standalone.open()
