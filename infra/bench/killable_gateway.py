"""A gateway that is killed and started again on the same state folder and port; and its processes, which are killed too."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import time
from pathlib import Path

import process_tree
import psutil
from servers import Server, gateway_command

STOP_S = 30.0
# These ports are below the range that the kernel uses for connections, so that no connection takes the
# gateway's port during a restart.
PORTS = range(18_000, 28_000)


class KillableGateway:
    """`up` is set while the gateway listens. `mark` is in the names of its functions, and so in the titles of processes."""

    def __init__(self, root: Path, mark: str) -> None:
        self.state = root / "state"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.up = asyncio.Event()
        self.restarts_s: list[float] = []
        self._log = root / "gateway.log"
        self._mark = mark
        self._server: Server | None = None
        self._seen: set[psutil.Process] = set()

    async def start(self) -> None:
        """Start the gateway, and wait until it listens."""
        began = time.monotonic()
        await asyncio.to_thread(self.spawn().wait_line)
        self.restarts_s.append(time.monotonic() - began)
        self.up.set()

    def spawn(self) -> Server:
        """Start the gateway, which may not listen yet."""
        command = gateway_command(
            port=self.port, state_dir=str(self.state), webhook_networks=["127.0.0.0/8"], keep_result_s=7200,
            drain_s=10,
        )  # fmt: skip
        self._server = Server("pilotflame", command, self._log, mark=self._mark)
        return self._server

    async def kill(self) -> None:
        """Kill the gateway alone. Its children must end by themselves."""
        if self._server is not None:
            await self._end(self._server, signal.SIGKILL)

    async def stop(self) -> int:
        """Send SIGTERM. Return the exit code, or -9 if the gateway had to be killed."""
        assert self._server is not None
        return await self._end(self._server, signal.SIGTERM)

    async def _end(self, server: Server, number: signal.Signals) -> int:
        self.up.clear()
        self._seen.update(process_tree.tree(server.pid)[1:])
        return await asyncio.to_thread(server.end_alone, number, STOP_S)

    def kill_one(self, role: str, chance: random.Random) -> bool:
        """Kill a process that has this role. Return False if there is none."""
        assert self._server is not None
        found = [one for one in process_tree.tree(self._server.pid)[1:] if process_tree.role(one) == role]
        with contextlib.suppress(psutil.NoSuchProcess):
            if found:
                chance.choice(found).kill()
                return True
        return False

    def left(self, timeout_s: float) -> list[str]:
        """End the processes that are still alive `timeout_s` after the call, when all gateways have ended. Return their titles."""
        # Find the processes by their titles: a process that has set its title has no environment to read.
        titled = (
            one
            for one in psutil.process_iter()
            if process_tree.role(one) and self._mark in process_tree.title(one)
        )
        found = {*self._seen, *process_tree.marked(self._mark), *titled}
        until_s = time.monotonic() + timeout_s
        while (left_s := until_s - time.monotonic()) > 0:
            # psutil raises this if a process ends while it is being opened.
            with contextlib.suppress(FileNotFoundError):
                psutil.wait_procs(found, timeout=left_s)
                break
        alive = [process for process in found if process_tree.alive(process)]
        names = [f"{process.pid} {process_tree.title(process)}" for process in alive]
        process_tree.end(alive, STOP_S)
        return names


def _free_port() -> int:
    for port in random.sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("there is no free port")
