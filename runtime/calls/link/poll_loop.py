"""An event loop for one link and little else, on a thread of its own. A worker whose handler runs on the main thread uses it.

It supports descriptors, callbacks and timers, but no tasks. After a fork, the first use of each of Python's objects copies a page of memory,
so a worker starts much faster with these few objects than with asyncio.
"""

from __future__ import annotations

import heapq
import os
import select
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Protocol

Act = Callable[[], object]
# A timer: its time in monotonic seconds, its number and its callback. The number orders timers of the same time.
_Timer = tuple[float, int, Act]
_READABLE, _WRITABLE = select.POLLIN, select.POLLOUT
# The kernel reports these events even if the loop does not ask for them. Each of them runs all callbacks of its descriptor.
_ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL


class HasFileno(Protocol):
    def fileno(self) -> int: ...


Descriptor = int | HasFileno


class LinkLoop(Protocol):
    """The part of an event loop that a link uses: asyncio's, or `PollLoop`."""

    def add_reader(self, fd: Descriptor, callback: Act, /) -> object: ...
    def remove_reader(self, fd: Descriptor, /) -> object: ...
    def add_writer(self, fd: Descriptor, callback: Act, /) -> object: ...
    def remove_writer(self, fd: Descriptor, /) -> object: ...
    def call_soon(self, callback: Callable[..., object], /, *arguments: Any) -> object: ...
    def call_soon_threadsafe(self, callback: Callable[..., object], /, *arguments: Any) -> object: ...
    def call_later(self, delay: float, callback: Callable[..., object], /, *arguments: Any) -> object: ...


class PollLoop:
    """The loop. While it runs, other threads call `call_soon_threadsafe` only."""

    def __init__(self, on_signal: Callable[[int], object]) -> None:
        """The loop calls `on_signal` with the number of each signal that was written to `signals`."""
        self._on_signal = on_signal
        self._poll = select.poll()
        self._woken = self.signals = -1
        """`signals` is for `signal.set_wakeup_fd`."""
        # By descriptor and event.
        self._callbacks: dict[int, dict[int, Act]] = {}
        self._soon: deque[Act] = deque()
        self._timers: list[_Timer] = []
        self._numbers = count()
        self._stopped = False

    def open(self) -> None:
        """Open the descriptors of the loop, by which other threads wake it. A zygote makes the loop, and calls `open` in each fork."""
        self._woken, self.signals = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watch(self._woken, _READABLE, self._wake_up)

    def run(self) -> None:
        """Run until `stop`. What a callback raises ends the loop."""
        while not self._stopped:
            for descriptor, events in self._poll.poll(self._wait_ms()):
                for event, callback in list(self._callbacks.get(descriptor, {}).items()):
                    if events & (event | _ENDED):
                        callback()
            self._call_due()

    def stop(self) -> None:
        """End `run` once the callbacks before this call have run. Any thread may call it."""
        self.call_soon_threadsafe(partial(setattr, self, "_stopped", True))

    def close_in_fork(self) -> None:
        """Close the descriptors of the loop in a fork of this process, where no thread runs the loop."""
        os.close(self._woken)
        os.close(self.signals)

    def add_reader(self, fd: Descriptor, callback: Act, /) -> None:
        self._watch(_number(fd), _READABLE, callback)

    def remove_reader(self, fd: Descriptor, /) -> None:
        self._forget(_number(fd), _READABLE)

    def add_writer(self, fd: Descriptor, callback: Act, /) -> None:
        self._watch(_number(fd), _WRITABLE, callback)

    def remove_writer(self, fd: Descriptor, /) -> None:
        self._forget(_number(fd), _WRITABLE)

    def call_soon(self, callback: Callable[..., object], /, *arguments: Any) -> None:
        self._soon.append(partial(callback, *arguments))

    def call_soon_threadsafe(self, callback: Callable[..., object], /, *arguments: Any) -> None:
        self.call_soon(callback, *arguments)
        # A pipe that is full wakes the loop as well.
        with suppress(BlockingIOError):
            os.write(self.signals, b"\0")

    def call_later(self, delay: float, callback: Callable[..., object], /, *arguments: Any) -> None:
        timer: _Timer = (time.monotonic() + delay, next(self._numbers), partial(callback, *arguments))
        heapq.heappush(self._timers, timer)

    def _watch(self, descriptor: int, event: int, callback: Act) -> None:
        callbacks = self._callbacks.setdefault(descriptor, {})
        callbacks[event] = callback
        self._poll.register(descriptor, sum(callbacks))

    def _forget(self, descriptor: int, event: int) -> None:
        callbacks = self._callbacks.get(descriptor, {})
        if callbacks.pop(event, None) is None:
            return
        if callbacks:
            self._poll.register(descriptor, sum(callbacks))
        else:
            self._poll.unregister(descriptor)
            del self._callbacks[descriptor]

    def _wait_ms(self) -> float | None:
        if self._soon:
            return 0
        return max(0.0, (self._timers[0][0] - time.monotonic()) * 1000) if self._timers else None

    def _call_due(self) -> None:
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()
        for _ in range(len(self._soon)):
            self._soon.popleft()()

    def _wake_up(self) -> None:
        for number in filter(None, os.read(self._woken, 4096)):
            self._on_signal(number)


def _number(fd: Descriptor) -> int:
    return fd if isinstance(fd, int) else fd.fileno()
