"""The fetcher as a process of its own: what it is asked and what it answers, also while a fetch does not stop."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fault_server import FaultServer
from pilotflame.snapshot.format.discover import find_manifest
from pilotflame.snapshot.format.manifest import MANIFEST_NAME
from pilotflame.snapshot.sources.http import HttpSource
from pulling import LIMIT_S, make

PROMPT_S = 5.0
"""Far below the ten seconds for which a connection may be tried."""


class Fetching:
    """A fetcher process and its two streams."""

    def __init__(self, cache: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pilotflame.runtime.launching.fetcher", str(cache)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def tell(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def hear(self, number: int, event: str) -> dict[str, Any]:
        """Read events until `event` of hold `number` comes."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            heard: dict[str, Any] = json.loads(line)
            if (heard.get("id"), heard["event"]) == (number, event):
                return heard
            assert heard["event"] != "failed" or heard.get("id") != number, heard
        raise AssertionError("the fetcher ended")


@contextmanager
def fetching(cache: Path) -> Iterator[Fetching]:
    found = Fetching(cache)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait(LIMIT_S)
        for pipe in (found.process.stdin, found.process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def unreachable() -> Iterator[str]:
    """The URL of a server to which connections are neither accepted nor refused: its queue is full."""
    with ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            queued = opened.enter_context(socket.socket())
            queued.setblocking(False)
            queued.connect_ex(server.getsockname())
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_fetch_that_does_not_stop_holds_up_no_other_request(tmp_path: Path) -> None:
    make(tmp_path / "one")
    other = make(tmp_path / "other", 1)
    with unreachable() as url, fetching(tmp_path / "cache") as fetcher:
        for number in range(1, 4):
            fetcher.tell(op="hold", id=number, manifest=str(tmp_path / "one"), url=url)
            fetcher.hear(number, "held")
        begun_s = time.monotonic()
        for number in range(1, 4):
            fetcher.tell(op="release", id=number)
        fetcher.tell(op="hold", id=4, manifest=str(tmp_path / "other"), url=str(tmp_path / "other"))
        assert fetcher.hear(4, "done")["bytes"] == other.total_bytes
        assert time.monotonic() - begun_s < PROMPT_S
        assert fetcher.process.stdin is not None
        fetcher.process.stdin.close()
        assert fetcher.process.wait(LIMIT_S) == 0


def test_weights_are_there_even_if_their_digests_cannot_be_kept(tmp_path: Path) -> None:
    make(tmp_path / "one")
    (tmp_path / "one" / MANIFEST_NAME).unlink()
    described = tmp_path / "described.json"
    with FaultServer(tmp_path / "one") as server, fetching(tmp_path / "cache") as fetcher:
        find_manifest(HttpSource(server.url)).write(described)
        with described.open() as opened:
            # Nobody can make files in this folder.
            place = f"/proc/{os.getpid()}/fd/{opened.fileno()}"
            fetcher.tell(op="hold", id=1, manifest=place, url=server.url)
            assert fetcher.hear(1, "done")["bytes"] > 0
