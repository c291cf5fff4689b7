"""Rolling restarts under load: the number of requests that are dropped while instances are replaced one at a time.

Callers choose among the endpoints, as the balancers of Kubernetes and Knative do, and never retry. In the order "first"
an instance is removed from the endpoints before its SIGTERM. In the order "late", which Kubernetes has, it gets SIGTERM
at once, and is removed some time after a probe of /readyz has failed.

    python infra/bench/soak_rolling.py --restarts 20
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from report import Report, parser

CALLERS = 8
INSTANCES = 2
LAME_DUCK_S = 3.0
PROBE_S = 0.25
MAX_DELAY_S = 1.5
START_S = 120.0
NAME = "rolling"
LONGEST_CALL_S = 0.4
HANDLER = """
import asyncio
async def handler(event):
    await asyncio.sleep(event["s"])
    return event
"""
SETTINGS = "concurrency = 16\n\n[scale]\nmin = 1\n"
SERVE = ["-m", "pilotflame.runtime.cli", "serve"]


class Instance:
    """One process. `session` keeps connections alive, as balancers do."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._process = process
        self.session = aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(total=60))

    async def status(self) -> int:
        """Return the status of /readyz on a new connection; 0 if there is no answer."""
        try:
            async with self.session.get("/readyz", headers={"Connection": "close"}) as response:
                return response.status
        except aiohttp.ClientError:
            return 0

    async def wait_ready(self) -> None:
        async with asyncio.timeout(START_S):
            while await self.status() != 200:
                if self._process.returncode is not None:
                    raise RuntimeError(f"an instance ended with {self._process.returncode} at its start")
                await asyncio.sleep(0.05)

    async def wait_unready(self) -> None:
        """Probe until /readyz fails, as a kubelet does."""
        while await self.status() == 200:  # noqa: ASYNC110  a kubelet polls
            await asyncio.sleep(PROBE_S)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    async def end(self) -> int:
        async with asyncio.timeout(START_S):
            code = await self._process.wait()
        await self.session.close()
        return code


class Instances:
    """The instances of one kind, the endpoints that the callers know, and what the callers saw.

    `alone`: each instance serves one function. Otherwise each is a gateway to which the function is deployed.
    """

    def __init__(self, folder: Path, *, alone: bool) -> None:
        self._folder, self._alone = folder, alone
        self._running: list[Instance] = []
        self.endpoints: list[Instance] = []
        self.answered = 0
        self.dropped: list[str] = []

    async def start(self) -> None:
        """Start an instance, and add it to the endpoints once it is ready."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = int(listener.getsockname()[1])
        function = str(self._folder / NAME)
        words = [function] if self._alone else ["--state-dir", str(self._folder / f"state-{port}")]
        env = {**os.environ, "PORT": str(port), "PILOTFLAME_LAME_DUCK_S": str(LAME_DUCK_S)}
        with (self._folder / "output.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *SERVE, *words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        instance = Instance(process, port)
        self._running.append(instance)
        await instance.wait_ready()
        if not self._alone:
            async with instance.session.post("/v1/functions", json={"path": function}) as response:
                if response.status != 201:
                    raise RuntimeError(await response.text())
        self.endpoints.append(instance)

    async def replace(self, *, late: bool) -> None:
        """Start a new instance, and end the oldest in the order "first" or "late"."""
        await self.start()
        old = self.endpoints[0]
        if late:
            old.terminate()
            await old.wait_unready()
            await asyncio.sleep(random.uniform(0, MAX_DELAY_S))
        self.endpoints.remove(old)
        if not late:
            old.terminate()
        await self._end(old)

    async def call(self, stop: asyncio.Event) -> None:
        """Call endpoints, each chosen at random, until `stop` is set."""
        path = "/" if self._alone else f"/invoke/{NAME}"
        while not stop.is_set():
            event = {"s": random.uniform(0, LONGEST_CALL_S)}
            try:
                async with random.choice(self.endpoints).session.post(path, json=event) as response:
                    answer = await response.text()
                    if response.status != 200:
                        self.dropped.append(f"{response.status} {answer[:200]}")
            except (aiohttp.ClientError, TimeoutError) as error:
                self.dropped.append(repr(error))
            self.answered += 1

    async def close(self) -> None:
        for instance in list(self._running):
            instance.terminate()
            await self._end(instance)

    async def _end(self, instance: Instance) -> None:
        self._running.remove(instance)
        if (code := await instance.end()) != 0:
            self.dropped.append(f"an instance ended with {code}")


@contextlib.asynccontextmanager
async def running(folder: Path, *, alone: bool) -> AsyncIterator[Instances]:
    instances = Instances(folder, alone=alone)
    try:
        for _ in range(INSTANCES):
            await instances.start()
        yield instances
    finally:
        await instances.close()


async def roll(folder: Path, restarts: int, *, alone: bool) -> Instances:
    """Replace instances under load, half of them in each order."""
    stop = asyncio.Event()
    async with running(folder, alone=alone) as instances, asyncio.TaskGroup() as callers:
        for _ in range(CALLERS):
            callers.create_task(instances.call(stop))
        try:
            for number in range(restarts):
                await instances.replace(late=number % 2 == 1)
        finally:
            stop.set()
    return instances


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--restarts", type=int, default=20)
    arguments = options.parse_args()
    report = Report("soak-rolling")
    for kind, alone in (("alone", True), ("gateway", False)):
        with tempfile.TemporaryDirectory(prefix="pf-rolling-", dir="/tmp") as name:
            function = Path(name) / NAME
            function.mkdir()
            (function / "handler.py").write_text(HANDLER)
            (function / "pilotflame.toml").write_text(SETTINGS)
            found = asyncio.run(roll(Path(name), arguments.restarts, alone=alone))
        report.add(f"{kind}_dropped", len(found.dropped), f"of {found.answered} requests", "<= 0")
        for text in found.dropped[:10]:
            report.note(f"{kind}: dropped: {text}")
    report.note(f"{arguments.restarts} restarts of each")
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
