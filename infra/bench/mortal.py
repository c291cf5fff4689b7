"""A gateway that is killed and comes back, on the same state folder and port; and the processes under it, to be killed too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import process_tree
import psutil

START_S = 60.0
STOP_S = 30.0
# Below the range from which the kernel takes ports for connections: while the gateway is down, none takes its port.
PORTS = range(18_000, 28_000)
ROLES = ("base", "zygote", "worker", "standby")
GATEWAY = """
import json, sys
from pathlib import Path
from pilotflame.runtime.main import run
from pilotflame.runtime.settings.gateway_settings import GatewaySettings

settings = json.loads(sys.argv[1])
run(GatewaySettings(**settings), on_listening=lambda url: print(url, flush=True))
"""


class Mortal:
    """`up` is set while it listens. `mark` is in the titles of the functions' processes."""

    def __init__(self, root: Path, mark: str) -> None:
        self.state = root / "state"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.up = asyncio.Event()
        self.restarts_s: list[float] = []
        self._scratch = root / "tmp"
        self._scratch.mkdir()
        self._log = root / "gateway.log"
        self._mark = mark
        self._process: asyncio.subprocess.Process | None = None
        self._seen: set[psutil.Process] = set()

    async def start(self) -> None:
        """Until it listens. RuntimeError with its last words if it ends before."""
        began = time.monotonic()
        process = await self.spawn()
        if process.stdout is None:
            raise RuntimeError("a gateway without a standard output")
        async with asyncio.timeout(START_S):
            said = await process.stdout.readline()
        if not said:
            raise RuntimeError(f"the gateway did not start: {self.last_words()}")
        self.restarts_s.append(time.monotonic() - began)
        self.up.set()

    async def spawn(self) -> asyncio.subprocess.Process:
        """A gateway that may not listen yet."""
        order = json.dumps(
            {
                "port": self.port, "state_dir": str(self.state), "webhook_networks": ["127.0.0.0/8"],
                "keep_result_s": 7200, "drain_s": 10,
            }
        )  # fmt: skip
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", GATEWAY, order,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log,
                env={**os.environ, "TMPDIR": str(self._scratch)},
            )  # fmt: skip
        return self._process

    async def kill(self) -> None:
        """Send SIGKILL, wait for the end, and remember the processes under the gateway."""
        self.up.clear()
        if self._process is not None:
            self._seen.update(process_tree.tree(self._process.pid)[1:])
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def stop(self) -> int:
        """SIGTERM; its exit code, or -9 if it had to be killed."""
        self.up.clear()
        process = self._process
        if process is None:
            return 0
        self._seen.update(process_tree.tree(process.pid)[1:])
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                return await process.wait()
        process.kill()
        return await process.wait()

    def kill_one(self, role: str, chance: random.Random) -> bool:
        """SIGKILL to one process in this role; whether there was one."""
        if self._process is None:
            return False
        found = [process for process in process_tree.tree(self._process.pid)[1:] if _role(process) == role]
        if not found:
            return False
        victim = chance.choice(found)
        self._seen.add(victim)
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            return False
        return True

    async def left(self, timeout_s: float) -> list[str]:
        """Return and end the processes that have outlived the gateways. Called when no gateway runs."""
        found = self._seen | set(self._ours())
        await asyncio.to_thread(psutil.wait_procs, found, timeout=timeout_s)
        alive = [process for process in found if process_tree.alive(process)]
        names = [f"{process.pid} {_title(process)}" for process in alive]
        process_tree.end(alive, STOP_S)
        return names

    def last_words(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""

    def _ours(self) -> list[psutil.Process]:
        """Find processes by title, or by environment before they have a title, including processes never seen as children."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                scratch = process.environ().get("TMPDIR") == str(self._scratch)
                if scratch or (_role(process) and self._mark in _title(process)):
                    found.append(process)
        return found


def _role(process: psutil.Process) -> str:
    words = _title(process).split()
    return words[1] if len(words) > 1 and words[0] == "pilotflame:" and words[1] in ROLES else ""


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _free_port() -> int:
    for port in random.sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("there is no free port")
