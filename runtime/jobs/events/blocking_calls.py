"""Runs the blocking calls of message buses' clients, each in its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
THREAD_NAME = "pilotflame-bus"


async def call_in_thread(call: Callable[[], T], on_abandoned: Callable[[T], object] | None = None) -> T:
    """Run a blocking call in a daemon thread and return its result.

    The thread is a daemon so that the gateway can exit during a poll, which lasts up to 20 s. If the caller is
    cancelled, the call goes on. When the call returns, another thread calls `on_abandoned` with its result.
    """
    result: Future[T] = Future()
    # A future in the state "running" cannot be cancelled, so the result can always be set.
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:  # noqa: BLE001  raised in the caller
            result.set_exception(error)

    def hand_over(abandoned: Callable[[T], object]) -> None:
        if result.exception() is None:
            abandoned(result.result())

    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
    try:
        return await asyncio.wrap_future(result)
    except asyncio.CancelledError:
        if on_abandoned is not None:
            threading.Thread(target=hand_over, args=(on_abandoned,), name=THREAD_NAME, daemon=True).start()
        raise
