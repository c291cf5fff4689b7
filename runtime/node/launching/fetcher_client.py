"""Controls the fetcher process for the gateway, and follows which snapshots it holds or fetches."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import sys
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson

from ....errors import LauncherError, PilotflameError
from ....snapshot.caching.node import DEFAULT_BUDGETS, Budgets
from ....snapshot.sources.variables import of_sources
from ...calls.link.child import KILLED_S
from ...calls.link.worker_spec import Weights, WorkerSpec
from ...ground.telemetry.refusals import Operation, refusal
from ...ground.telemetry.snapshot_metrics import SnapshotMetrics
from ...ground.telemetry.timeline import Fetch
from .child_output import ChildOutput
from .process_launcher import python_path
from .started_process import StartedProcess

LOG = logging.getLogger(__name__)
HOLD_TIMEOUT_S = 300.0
# From the beginning of a hold, all its weights may take this long to arrive. The fetcher and the workers wait until
# that time is over.
WEIGHTS_TIMEOUT_S = 3600.0
SHARE_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 1 << 20
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Sharing:
    """How this node exchanges chunks with other nodes. It serves chunks on `host` and `port`.

    `urls` are the URLs of the other nodes. `token` is the secret that all nodes share. `certificate` has the paths of
    two PEM files for TLS: the chain and the key.
    """

    host: str
    port: int
    urls: Sequence[str]
    token: str = field(repr=False)
    certificate: tuple[str, str] | None = None


class FetchProgress:
    """One hold of a snapshot. `held` is done once the snapshot's files can be mapped."""

    def __init__(self, number: int, weights: Weights, user: object) -> None:
        self.number, self.weights, self.user = number, weights, user
        self.fetch = Fetch(time.monotonic(), name=weights.name)
        self.error: PilotflameError | None = None
        self.deadline_s = time.monotonic() + WEIGHTS_TIMEOUT_S
        """The time by which all bytes must be here, in monotonic seconds."""
        self.held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when all bytes are here, or when the fetch has failed with `error`."""

    @property
    def left_s(self) -> float:
        """How long the bytes may still take; WEIGHTS_TIMEOUT_S if they have arrived."""
        return WEIGHTS_TIMEOUT_S if self.ended.done() else max(0.0, self.deadline_s - time.monotonic())

    def on_event(self, event: dict[str, Any]) -> None:
        """Update the state from an event of the fetcher."""
        if event["event"] == "failed":
            self.fail(PilotflameError.from_wire(event["error"]))
            return
        if event["event"] == "done":
            self.fetch.ended_s, self.fetch.fetched_bytes = time.monotonic(), int(event["bytes"])
            self.ended.set_result(None)
        if not self.held.done():
            self.held.set_result(None)

    def fail(self, error: PilotflameError) -> None:
        self.error = error = error.about(self.weights.subject)
        if not self.ended.done():
            self.ended.set_result(None)
        self.fetch.ended_s = self.fetch.ended_s or time.monotonic()
        if not self.held.done():
            self.held.set_exception(error)
            # Retrieve the exception: otherwise asyncio logs an error if nothing awaits `held`.
            self.held.exception()


class ResidentWeights:
    """The snapshots that are in memory, and the users that want them to stay there after their holds. A user is an
    object that a caller has passed to `FetcherClient.hold`.
    """

    def __init__(self) -> None:
        self._used: dict[object, dict[str, str]] = {}
        """For each user, the digests of the snapshots that it has held, by the name of the snapshot."""
        self._in_memory: dict[str, int] = {}
        """The snapshots in memory, by digest, and their bytes."""
        self._given_back: set[str] = set()
        """The digests of snapshots that `take_unused` has counted and must not count again, because they are still in
        memory and no user has held them since.

        The fetcher leaves such a snapshot in memory if it is in use or not on the disk.
        """

    @property
    def wanted(self) -> set[str]:
        """The digests of the snapshots that a user has held and not dropped."""
        return {digest for used in self._used.values() for digest in used.values()}

    def bytes_of(self, user: object) -> int:
        """Return the number of bytes in memory of the snapshots that `user` has held and not dropped."""
        return sum(self._in_memory.get(digest, 0) for digest in set(self._used.get(user, {}).values()))

    def on_held(self, progress: FetchProgress, digest: str) -> None:
        """Learn the digest of a snapshot that is held."""
        self._given_back.discard(digest)
        if progress.user is not None:
            self._used.setdefault(progress.user, {})[progress.weights.name] = digest

    def on_tiers(self, in_memory: dict[str, int]) -> None:
        """Use the fetcher's report about the snapshots in memory."""
        self._in_memory = in_memory
        self._given_back &= in_memory.keys()

    def forget(self, user: object) -> set[str]:
        """Forget which snapshots `user` wants in memory. Return the digests of the snapshots that no user wants any more.

        This alone frees no memory: the snapshots stay in memory until the fetcher is asked to drop them.
        """
        return set(self._used.pop(user, {}).values()) - self.wanted

    def take_unused(self) -> int:
        """Return the bytes of the snapshots that no user wants. Later calls do not count these snapshots again."""
        unused = self._in_memory.keys() - self.wanted - self._given_back
        self._given_back |= unused
        return sum(self._in_memory[digest] for digest in unused)


class FetcherClient:
    """Holds snapshots through the fetcher. The first call that needs the fetcher starts it. If the fetcher has ended,
    the next such call starts it again.
    """

    def __init__(
        self,
        cache: Path,
        tasks: asyncio.TaskGroup,
        budgets: Budgets = DEFAULT_BUDGETS,
        sharing: Sharing | None = None,
    ) -> None:
        self.cache, self._budgets, self._sharing = cache, budgets, sharing
        self.metrics, self.resident = SnapshotMetrics(), ResidentWeights()
        self._tasks = tasks
        self._numbers = itertools.count(1)
        self._held: dict[int, FetchProgress] = {}
        self._process: StartedProcess | None = None
        self._requests: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._port: asyncio.Future[int] | None = None
        """The port on which the fetcher serves chunks to other nodes."""

    @property
    def pids(self) -> list[int]:
        """The pid of the fetcher, if it runs."""
        return [self._process.pid] if self._process is not None and self._process.alive else []

    async def share(self) -> None:
        """Start the fetcher if this node exchanges chunks with other nodes. Raise LauncherError if it cannot serve chunks."""
        if self._sharing is None:
            return
        await self._ensure_started()
        try:
            async with asyncio.timeout(SHARE_TIMEOUT_S):
                if self._port is not None:
                    await asyncio.shield(self._port)
        except TimeoutError:
            message = f"The fetcher did not respond within {SHARE_TIMEOUT_S:.0f} s."
            raise LauncherError(message, remedy="Look at the load of this machine.") from None

    async def warm(self, spec: WorkerSpec, secrets: Mapping[str, str]) -> None:
        """Start the fetcher, and let it import the modules that fetch the snapshots of `spec`.

        A failure is ignored: the first hold tries again and reports it.
        """
        with contextlib.suppress(LauncherError):
            await self._ensure_started()
            for weights in spec.remote:
                self._send(op="prepare", **_order(weights, secrets))

    async def prefetch(self, spec: WorkerSpec, secrets: Mapping[str, str]) -> int:
        """Bring the snapshots of `spec` to this node, including its disk. Return how many bytes were fetched.

        The cache may evict the snapshots at any time after that. Raise SourceError, CacheError, SnapshotError or
        LauncherError.
        """
        fetches = [self._prefetch(spec.function, weights, secrets) for weights in spec.remote]
        return sum(await all_of(fetches))

    async def _prefetch(self, function: str, weights: Weights, secrets: Mapping[str, str]) -> int:
        progress = await self.hold(weights, secrets, copied=True)
        try:
            async with asyncio.timeout(progress.left_s):
                await asyncio.shield(progress.ended)
        except TimeoutError:
            message = f"The weights of {function} did not arrive within {WEIGHTS_TIMEOUT_S:.0f} s."
            error = LauncherError(message, remedy="Try again: what has arrived is kept.")
            raise error.about(weights.subject) from None
        finally:
            self.release(progress)
        if progress.error is not None:
            raise progress.error
        return progress.fetch.fetched_bytes

    async def hold(
        self, weights: Weights, secrets: Mapping[str, str], *, copied: bool = False, user: object = None
    ) -> FetchProgress:
        """Hold a snapshot. Return once its files can be mapped; bytes may still be arriving.

        `secrets` are the secrets of the function. The fetcher gets only the secrets that sources use. With `copied`, the
        fetch ends only when the snapshot is on the disk too. `user` is the object that wants the snapshot in memory until
        `drop`. Raise SourceError, CacheError, SnapshotError or LauncherError.
        """
        await self._ensure_started()
        progress = FetchProgress(next(self._numbers), weights, user)
        self._held[progress.number] = progress
        self.metrics.began()
        order = _order(weights, secrets)
        self._send(op="hold", id=progress.number, timeout_s=progress.left_s, copied=copied, **order)
        try:
            async with asyncio.timeout(HOLD_TIMEOUT_S):
                await progress.held
        except BaseException as error:
            self.release(progress)
            if not isinstance(error, TimeoutError):
                raise
            message = f"The fetcher did not respond within {HOLD_TIMEOUT_S:.0f} s."
            raise LauncherError(message, remedy="Check that the disk of the cache responds.") from None
        return progress

    def release(self, progress: FetchProgress) -> None:
        """End a hold: the fetcher stops fetching the snapshot, and the cache may evict it."""
        if self._held.pop(progress.number, None) is not None:
            if not progress.fetch.ended_s:
                self.metrics.ended("released")
            self._send(op="release", id=progress.number)

    def drop(self, user: object) -> None:
        """Let the weights of `user` leave the memory, except weights that others use or that are not on the disk."""
        self._send(op="drop", digests=sorted(self.resident.forget(user)))

    def give_back(self) -> int:
        """Let the fetcher delete unused files from memory, because memory is short. Return the number of freed bytes.

        The unused files are the spare files, and all weights except the weights that a user has held and not dropped. Later
        calls return 0 until there are more unused files.
        """
        if self._requests is None or self._requests.is_closing():
            return 0
        freed_bytes = self.resident.take_unused() + self.metrics.take_spare_bytes()
        if freed_bytes:
            self._send(op="give_back", keep=sorted(self.resident.wanted))
        return freed_bytes

    async def close(self) -> None:
        """End the fetcher and wait until it has ended."""
        self._closed = True
        if self._process is None or self._requests is None or self._reading is None:
            return
        self._requests.close()
        # `_read` returns when the process has ended.
        await asyncio.wait([self._reading], timeout=STOP_TIMEOUT_S)
        self._process.kill()
        await asyncio.wait([self._reading], timeout=KILLED_S)
        if not self._reading.done():
            LOG.error("the fetcher (pid %d) has not ended, although it was killed", self._process.pid)
        with contextlib.suppress(OSError):
            await self._requests.wait_closed()

    async def _ensure_started(self) -> None:
        async with self._starting:
            if self._closed:
                raise LauncherError("The gateway is shutting down.")
            if self._process is None or not self._process.alive:
                self._process = await self._start()

    async def _start(self) -> StartedProcess:
        # A socket pair instead of pipes, because asyncio may close the pipes of a process early.
        ours, theirs = socket.socketpair()
        output = ChildOutput("fetcher")
        try:
            process = await StartedProcess.start(
                (sys.executable, "-m", "pilotflame.runtime.node.launching.fetcher", str(self.cache), orjson.dumps(self._budgets)),
                stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=output.fileno(),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(python_path())},
            )  # fmt: skip
        except OSError as error:
            ours.close()
            output.close()
            refused = refusal(Operation.PYTHON, error.errno)
            raise LauncherError(
                f"The fetcher cannot be started: {refused.why}.", remedy=refused.remedy
            ) from error
        finally:
            theirs.close()
            output.started()
        ours.setblocking(False)
        events, self._requests = await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE_BYTES)
        self._held = {}
        self._reading = self._tasks.create_task(self._read(process, events, self._requests, output))
        if self._sharing is not None:
            self._port = asyncio.get_running_loop().create_future()
            self._send(op="share", **asdict(self._sharing))
        return process

    def _send(self, **request: Any) -> None:
        if self._requests is not None and not self._requests.is_closing():
            self._requests.write(orjson.dumps(request) + b"\n")

    async def _read(
        self, process: StartedProcess, events: asyncio.StreamReader, requests: asyncio.StreamWriter, output: ChildOutput
    ) -> None:  # fmt: skip
        # The holds of this fetcher process. `_start` replaces `self._held` when it starts another process.
        held = self._held
        # OSError: the fetcher died with unread requests, which resets the connection.
        with contextlib.suppress(OSError):
            while line := await events.readline():
                try:
                    self._on_event(held, orjson.loads(line))
                except (ValueError, KeyError, TypeError):
                    # The line is not an event: a library printed it in the fetcher.
                    LOG.info("fetcher: %s", line.decode(errors="replace").rstrip())
        requests.close()
        ended = f"The fetcher ended (exit code {await process.wait()})"
        error = output.end(ended, remedy="See `pilotflame logs` for its output.")
        for progress in held.values():
            if not progress.fetch.ended_s:
                self.metrics.ended("failed")
            progress.fail(error)
        held.clear()
        self._fail_to_share(error)

    def _on_event(self, held: dict[int, FetchProgress], event: dict[str, Any]) -> None:
        if event["event"] == "tiers":
            self.metrics.on_tiers(event["tiers"])
            self.resident.on_tiers(event["in_memory"])
        elif event["event"] == "shared":
            self.metrics.on_shared(event["taken_bytes"], event["served_bytes"])
        elif event["event"] in {"sharing", "refused"}:
            self._on_peers(event)
        elif (progress := held.get(event["id"])) is not None:
            progress.on_event(event)
            if event["event"] == "held":
                self.resident.on_held(progress, event["digest"])
            else:
                self.metrics.ended(event["event"])

    def _on_peers(self, event: dict[str, Any]) -> None:
        if event["event"] == "refused":
            LOG.warning("%s", event["message"])
        elif "error" in event:
            self._fail_to_share(PilotflameError.from_wire(event["error"]))
        elif self._port is not None and not self._port.done():
            self._port.set_result(event["port"])

    def _fail_to_share(self, error: PilotflameError) -> None:
        if self._port is not None and not self._port.done():
            LOG.error("%s", error.whole)
            self._port.set_exception(error)
            # Retrieve the exception: otherwise asyncio logs an error if nothing awaits the future.
            self._port.exception()


async def all_of(running: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run coroutines at the same time and return their results. If one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(one) for one in running]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in started]


def _order(weights: Weights, secrets: Mapping[str, str]) -> dict[str, Any]:
    # Copy the assets from `weights.root`: the deploy has put them there for the workers.
    return {
        "manifest": str(weights.manifest), "url": weights.source, "assets": str(weights.root),
        "secrets": of_sources(secrets), "access": weights.access.to_wire(),
    }  # fmt: skip
