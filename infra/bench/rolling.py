"""Rolling restarts under load: two instances, one at a time replaced by a new one, and how many requests that drops.

Callers choose among the endpoints, as Kubernetes' and Knative's balancers do, and never try again. In the order "first"
an instance is taken out of the endpoints before its SIGTERM. In the order "late", which Kubernetes has, it gets SIGTERM
at once, and is taken out when a probe of /readyz has failed and the news has travelled. Ends with 1 if any is dropped.

    python infra/bench/rolling.py --restarts 20 [--containers]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from report import Report

CALLERS = 8
INSTANCES = 2
LAME_DUCK_S = 3.0
PROBE_S = 0.25
MAX_NEWS_S = 1.5
START_S = 120.0
NAME = "rolling"
LONGEST_CALL_S = 0.4
TESTS = Path(__file__).resolve().parents[2] / "tests"
HANDLER = """
import asyncio
async def handler(event):
    await asyncio.sleep(event["s"])
    return event
"""
SETTINGS = "concurrency = 16\n\n[scale]\nmin = 1\n"
SERVE = ["-m", "pilotflame.runtime.cli", "serve"]


@dataclass
class Tally:
    """What the callers of one kind saw."""

    answered: int = 0
    dropped: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class Instance:
    """One process or container. `session` keeps connections alive, as balancers do."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._process = process
        self.session = aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(total=60))

    async def status(self, path: str) -> int:
        """Return the status of a probe on a new connection; 0 if there is no answer."""
        try:
            async with self.session.get(path, headers={"Connection": "close"}) as response:
                return response.status
        except aiohttp.ClientError:
            return 0

    async def wait_ready(self, path: str = "/readyz") -> None:
        async with asyncio.timeout(START_S):
            while await self.status(path) != 200:
                if self._process.returncode is not None:
                    raise RuntimeError(f"an instance ended with {self._process.returncode} at its start")
                await asyncio.sleep(0.05)

    async def wait_unready(self) -> None:
        """Probe until /readyz fails, as a kubelet does."""
        while await self.status("/readyz") == 200:  # noqa: ASYNC110  a kubelet polls
            await asyncio.sleep(PROBE_S)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    async def end(self) -> int:
        async with asyncio.timeout(START_S):
            code = await self._process.wait()
        await self.session.close()
        return code


class Fleet:
    """The instances of one kind, and the endpoints that the callers know."""

    def __init__(self, folder: Path, *, alone: bool, image: str) -> None:
        self._folder, self._alone, self._image = folder, alone, image
        self._numbers = itertools.count(1)
        self._running: list[Instance] = []
        self.endpoints: list[Instance] = []
        self.tally = Tally()

    async def start(self) -> Instance:
        """Start an instance, and add it to the endpoints once it is ready."""
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = int(sock.getsockname()[1])
        state = self._folder / f"state-{next(self._numbers)}"
        instance = Instance(await self._launch(port, state), port)
        self._running.append(instance)
        if not self._alone:
            await instance.wait_ready()
            async with instance.session.post("/v1/functions", json={"path": str(self._function)}) as response:
                if response.status != 201:
                    raise RuntimeError(await response.text())
        await instance.wait_ready()
        self.endpoints.append(instance)
        return instance

    async def replace(self, *, late: bool) -> None:
        """Start a new instance, and end the oldest in the order "first" or "late"."""
        await self.start()
        old = self.endpoints[0]
        if late:
            old.terminate()
            await old.wait_unready()
            await asyncio.sleep(random.uniform(0, MAX_NEWS_S))
        self.endpoints.remove(old)
        if not late:
            old.terminate()
        await self._end(old)

    async def call(self, stop: asyncio.Event) -> None:
        """Call, again and again, one endpoint or another, and count."""
        path = "/" if self._alone else f"/invoke/{NAME}"
        while not stop.is_set():
            event = {"s": random.uniform(0, LONGEST_CALL_S)}
            begun_s = time.monotonic()
            try:
                async with random.choice(self.endpoints).session.post(path, json=event) as response:
                    answer = await response.text()
                    if response.status != 200:
                        self.tally.dropped.append(f"{response.status} {answer[:200]}")
            except (aiohttp.ClientError, TimeoutError) as error:
                self.tally.dropped.append(repr(error))
            self.tally.answered += 1
            self.tally.slowest_s = max(self.tally.slowest_s, time.monotonic() - begun_s)

    async def close(self) -> None:
        for instance in list(self._running):
            instance.terminate()
            await self._end(instance)

    @property
    def _function(self) -> Path:
        return self._folder / NAME

    async def _end(self, instance: Instance) -> None:
        self._running.remove(instance)
        if (code := await instance.end()) != 0:
            self.tally.dropped.append(f"an instance ended with {code}")

    async def _launch(self, port: int, state: Path) -> asyncio.subprocess.Process:
        words = [*SERVE, *([str(self._function)] if self._alone else ["--state-dir", str(state)])]
        variables = {"PORT": str(port), "PILOTFLAME_LAME_DUCK_S": str(LAME_DUCK_S)}
        command = [sys.executable, *words]
        if self._image:
            command = [
                "podman", "--runtime", "runc", "run", "--rm", "--network", "host", "--ulimit", "nofile=1024:1024",
                "--ulimit", "nproc=1024:1024", "--read-only", "--user", "1000", "-v", f"{self._folder}:{self._folder}",
                *(f"--env={key}={value}" for key, value in variables.items()),
                self._image, "/usr/local/bin/python", *words,
            ]  # fmt: skip
        with (self._folder / "output.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )


@contextlib.asynccontextmanager
async def running(folder: Path, *, alone: bool, image: str) -> AsyncIterator[Fleet]:
    fleet = Fleet(folder, alone=alone, image=image)
    try:
        for _ in range(INSTANCES):
            await fleet.start()
        yield fleet
    finally:
        await fleet.close()


async def roll(folder: Path, restarts: int, *, alone: bool, image: str) -> Tally:
    """Replace instances under load, half of them in each order."""
    stop = asyncio.Event()
    async with running(folder, alone=alone, image=image) as fleet, asyncio.TaskGroup() as callers:
        for _ in range(CALLERS):
            callers.create_task(fleet.call(stop))
        try:
            for number in range(restarts):
                await fleet.replace(late=number % 2 == 1)
        finally:
            stop.set()
    return fleet.tally


def written_function() -> Path:
    """Return a new folder with the function in it, into which every user may write."""
    folder = Path(tempfile.mkdtemp(prefix="pf-rolling-", dir="/tmp"))
    folder.chmod(0o777)
    (folder / NAME).mkdir()
    (folder / NAME / "handler.py").write_text(HANDLER)
    (folder / NAME / "pilotflame.toml").write_text(SETTINGS)
    return folder


def image_for_containers() -> str:
    """Return the image of the tests: this machine's Python and the installed pilotflame."""
    sys.path.append(str(TESTS))
    # Imported here, because only --containers needs it.
    from containers import made_image  # type: ignore[import-not-found]  # noqa: PLC0415

    return str(made_image())


def measure(report: Report, restarts: int, image: str) -> None:
    dropped = 0
    for kind, alone in (("alone", True), ("gateway", False)):
        folder = written_function()
        try:
            tally = asyncio.run(roll(folder, restarts, alone=alone, image=image))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        dropped += len(tally.dropped)
        report.add(f"{kind}_dropped", len(tally.dropped), "requests", "<= 0")
        report.add(f"{kind}_requests", tally.answered, "requests", ">= 1")
        report.add(f"{kind}_slowest_ms", tally.slowest_s * 1000, "ms")
        for text in tally.dropped[:10]:
            report.note(f"{kind}: dropped: {text}")
    report.add("restarts_of_each", restarts)
    report.add("dropped_in_restarts", dropped, "requests", "<= 0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--containers", action="store_true", help="run the instances with podman")
    options = parser.parse_args()
    report = Report("rolling")
    measure(report, options.restarts, image_for_containers() if options.containers else "")
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
