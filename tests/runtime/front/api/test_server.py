"""The gateway on a socket that systemd has opened: real processes, started as systemd starts them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from live import LIMIT_S, PROCESS

# Does what systemd does between fork and exec: passes the sockets as the descriptors from 3 on, and sets LISTEN_PID to the pid of
# the program.
ACTIVATE = """
import fcntl, os, sys
sockets = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 50) for number in sys.argv[1].split(",")]
for place, number in enumerate(sockets):
    os.dup2(number, 3 + place)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(sockets)), "LISTEN_FDNAMES": "http"}
os.execv(sys.executable, [sys.executable, "-c", sys.argv[2], sys.argv[3]])
"""
SETTINGS = '{"port": 8600, "state_dir": "%s", "drain_s": 1.0}'


@contextlib.asynccontextmanager
async def activated(state: Path, *socks: socket.socket) -> AsyncIterator[asyncio.subprocess.Process]:
    numbers = [sock.fileno() for sock in socks]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ACTIVATE, ",".join(map(str, numbers)), PROCESS, SETTINGS % state,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, pass_fds=numbers,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def listening(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        return (await process.stdout.readline()).decode().strip()


async def test_a_gateway_serves_on_the_socket_of_systemd_and_requests_wait_for_its_restart(
    state: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client,
            activated(state, sock) as first,
        ):
            assert await listening(first) == url
            assert (await client.get("/healthz")).status_code == 200
            first.send_signal(signal.SIGTERM)
            async with asyncio.timeout(LIMIT_S):
                assert await first.wait() == 0
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as later, asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(later.get("/healthz"))
            async with activated(state, sock):
                assert (await waiting).status_code == 200


async def test_two_sockets_or_one_that_is_not_for_tcp_are_refused(state: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(state.parent / "unix.sock"))
        for socks, text in (((tcp, tcp), "LISTEN_FDS=2"), ((unix,), "is not for TCP")):
            async with activated(state, *socks) as process:
                _, said = await process.communicate()
                assert process.returncode != 0
                assert text in said.decode()
