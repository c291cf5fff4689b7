"""Calls functions without an event loop of the caller: `pilotflame.Client`."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import weakref
from collections import deque
from collections.abc import Coroutine, Generator, Iterable
from concurrent.futures import CancelledError, Future
from typing import Any, Self, TypeVar, Unpack

from ....errors import Cancelled
from ...jobs.stored.job import JobState
from .async_client import AsyncClient, AsyncFunctionHandle, AsyncJobHandle, JobOptions
from .session import AHEAD, CONCURRENCY, RETRY_S, TIMEOUT_S, slots_of

T = TypeVar("T")
THREAD_NAME = "pilotflame-client"
START_S = 10.0
END_S = 5.0


class _LoopThread:
    """An event loop in a thread, which the first call starts. A forked child starts another one."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        # The lock of each process, by its id: a child must not wait for a lock that a thread of its parent held at the fork.
        self._locks = dict[int, threading.Lock]()
        self._pid, self._thread = 0, threading.Thread()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work`, and return its future. Cancelling the future cancels the work."""
        # `close` takes the same lock, so the loop has begun this work before it ends. At its end, the loop cancels the work.
        try:
            with self._lock:
                return asyncio.run_coroutine_threadsafe(work, self._running())
        except BaseException:
            # Close work that has not begun, for example after Ctrl-C. Otherwise Python warns that it was never awaited.
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which has a deadline. Ctrl-C cancels the work."""
        future = self.start(work)
        try:
            return _result_of(future)
        finally:
            future.cancel()

    def close(self) -> None:
        """End the thread, and with it all work and connections."""
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is None or self._pid != os.getpid():
                return
            loop.call_soon_threadsafe(self._stop.set)
        # A thread cannot wait for its own end, and garbage collection may call `close` in this thread.
        if self._thread is not threading.current_thread():
            self._thread.join(END_S)

    @property
    def _lock(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._pid != os.getpid():
            started = Future[asyncio.AbstractEventLoop]()
            self._pid, self._stop = os.getpid(), asyncio.Event()
            serve = self._serve(started, self._stop)
            self._thread = threading.Thread(target=asyncio.run, args=(serve,), name=THREAD_NAME, daemon=True)
            self._thread.start()
            self._loop = started.result(START_S)
        return self._loop

    async def _serve(self, started: Future[asyncio.AbstractEventLoop], stop: asyncio.Event) -> None:
        async with self._client:
            started.set_result(asyncio.get_running_loop())
            await stop.wait()
            # Cancel the calls before the connections close. Otherwise the calls would fail with errors of connections.
            work = asyncio.all_tasks() - {asyncio.current_task()}
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)


class SyncClient:
    """A client of the gateway at `url`. Use it as a context manager, or close it. Threads may share it."""

    def __init__(
        self, url: str | None = None, *, api_key: str | None = None, timeout_s: float = TIMEOUT_S, retry_s: float = RETRY_S
    ) -> None:  # fmt: skip
        """Take the same parameters as AsyncClient."""
        self._client = AsyncClient(url, api_key=api_key, timeout_s=timeout_s, retry_s=retry_s)
        self.loop = _LoopThread(self._client)
        weakref.finalize(self, self.loop.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all calls, and close the connections. A later call opens new ones."""
        self.loop.close()

    def function(self, name: str) -> FunctionHandle:
        """Return a function by its name. This sends no request."""
        return FunctionHandle(self, self._client.function(name))


class FunctionHandle:
    """A deployed function."""

    def __init__(self, client: SyncClient, function: AsyncFunctionHandle) -> None:
        self.name = function.name
        # Keep the client: if it were garbage, its finalizer would end this handle's calls.
        self._client, self._function = client, function

    def call(self, event: Any = None, *, timeout_s: float | None = None) -> Any:
        """Call the function. The values, the result and the errors are the same as with AsyncFunctionHandle.call."""
        return self._client.loop.run(self._function.call(event, timeout_s=timeout_s))

    def map(
        self, events: Iterable[Any], *, concurrency: int = CONCURRENCY, timeout_s: float | None = None,
        return_exceptions: bool = False,
    ) -> Generator[Any, None, None]:  # fmt: skip
        """Call the function with each event. This is the same as AsyncFunctionHandle.map, but the caller's thread reads the events."""
        slots, waiting = slots_of(concurrency), deque[Future[Any]]()
        try:
            for event in events:
                while waiting and (waiting[0].done() or len(waiting) == AHEAD * concurrency):
                    yield _result_of(waiting[0])
                    waiting.popleft()
                work = self._function.call_in(slots, event, timeout_s, return_exceptions)
                waiting.append(self._client.loop.start(work))
            # Remove a future only after its result, so that `finally` cancels it if Ctrl-C ends the wait.
            while waiting:
                yield _result_of(waiting[0])
                waiting.popleft()
        finally:
            for future in waiting:
                future.cancel()

    def submit(self, event: Any = None, **options: Unpack[JobOptions]) -> JobHandle:
        """Store a job, and return it. The parameters are the same as with AsyncFunctionHandle.submit."""
        return JobHandle(self._client, self._client.loop.run(self._function.submit(event, **options)))

    def job(self, job_id: str) -> JobHandle:
        """Return a job of this function by its id. This sends no request."""
        return JobHandle(self._client, self._function.job(job_id))


class JobHandle:
    """A job. Its `id` finds it again later, in any process."""

    def __init__(self, client: SyncClient, job: AsyncJobHandle) -> None:
        self.id = job.id
        self._client, self._job = client, job

    def status(self) -> JobState:
        return self._client.loop.run(self._job.status())

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the end of the job, and return its output. Raise its error, or DeadlineExceeded after `timeout_s`."""
        return self._client.loop.run(self._job.result(timeout_s))

    def cancel(self) -> JobState:
        """Cancel the job unless it has ended, and return its state."""
        return self._client.loop.run(self._job.cancel())


def _result_of(future: Future[T]) -> T:
    """Return the result of work on the loop. Raise Cancelled if the client was closed."""
    try:
        return future.result()
    except CancelledError:
        raise Cancelled(
            "The client was closed while it waited.", remedy="Close it after its calls."
        ) from None
