"""Defines in one table what each signal does to the gateway's process.

The signals of a terminal are only for the gateway. The base and the fetcher have sessions of their own, as zygotes and
workers do, so that these signals do not reach them. If a tool sends such a signal to one of these processes, the process
ignores it (`OF_GATEWAY` in calls/link/worker_spec.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
from collections.abc import Callable, Iterator
from enum import StrEnum

LOG = logging.getLogger(__name__)


class Action(StrEnum):
    """What the gateway does when it gets a signal."""

    DRAIN = "drain"
    """The gateway finishes the running calls and ends. A second such signal ends it at once."""
    RELOAD = "reload"
    """The gateway reads its TLS certificate again, if it has one, and goes on: the terminal may have closed. `dev` ends
    with its terminal, so it drains instead.
    """
    IGNORE = "ignore"


TABLE = {
    signal.SIGTERM: Action.DRAIN,
    signal.SIGINT: Action.DRAIN,
    signal.SIGQUIT: Action.DRAIN,
    signal.SIGHUP: Action.RELOAD,
    signal.SIGUSR1: Action.IGNORE,
    signal.SIGUSR2: Action.IGNORE,
    # Python itself ignores these two signals. Instead, a write to a closed connection, or beyond the size limit of files,
    # raises an error.
    signal.SIGPIPE: Action.IGNORE,
    signal.SIGXFSZ: Action.IGNORE,
}
OF_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


@contextlib.contextmanager
def handled(on_stop: Callable[[int], None], on_reload: Callable[[], None]) -> Iterator[None]:
    """Inside the block, do what the table says. The first signal that drains calls `on_stop` with its number."""
    loop = asyncio.get_running_loop()
    numbers = [number for number in TABLE if number not in OF_PYTHON]
    draining = [number for number in numbers if TABLE[number] is Action.DRAIN]

    def stop(received: int) -> None:
        for number in draining:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        LOG.info("draining; press Ctrl-C again to stop at once")
        on_stop(received)

    def ignore(received: signal.Signals) -> None:
        LOG.info("%s was ignored: SIGTERM ends the gateway", received.name)

    actions: dict[Action, Callable[[signal.Signals], None]] = {
        Action.DRAIN: stop, Action.RELOAD: lambda _received: on_reload(), Action.IGNORE: ignore,
    }  # fmt: skip
    for number in numbers:
        loop.add_signal_handler(number, functools.partial(actions[TABLE[number]], number))
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
