"""The fetcher as a process of its own: its orders and its answers, also while a fetch does not stop."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fault_server import FaultServer
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.discover import find_manifest
from pilotflame.snapshot.format.manifest import MANIFEST_NAME
from pilotflame.snapshot.sources.http import HttpSource
from pulling import LIMIT_S, fetching, make

PROMPT_S = 5.0
"""Much less than the ten seconds after which an attempt to connect ends."""


@contextmanager
def unreachable() -> Iterator[str]:
    """Yield the URL of a server that neither accepts nor refuses connections, because its queue is full."""
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
            # The fetcher cannot store the digests beside the manifest: no process can make files in this folder.
            place = f"/proc/{os.getpid()}/fd/{opened.fileno()}"
            fetcher.tell(op="hold", id=1, manifest=place, url=server.url)
            assert fetcher.hear(1, "done")["bytes"] > 0


def test_assets_that_the_deploy_has_are_not_asked_for_and_connections_stay(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for number, folder in enumerate(folders):
        make(folder, number)
        (folder / "config.json").write_text("{}")
        create(folder).write(folder / MANIFEST_NAME)
    with FaultServer(tmp_path) as server, fetching(tmp_path / "cache") as fetcher:
        for number, folder in enumerate(folders, 1):
            order = {"manifest": str(folder / MANIFEST_NAME), "url": f"{server.url}/{folder.name}"}
            fetcher.tell(op="prepare", **order)
            fetcher.tell(op="hold", id=number, assets=str(folder), **order)
            assert fetcher.hear(number, "done")["bytes"] > 0
        assert {request.name for request in server.requests} == {
            "one/model.safetensors",
            "other/model.safetensors",
        }


def test_what_cannot_be_prepared_is_told_by_the_hold(tmp_path: Path) -> None:
    manifest = make(tmp_path / "one")
    with fetching(tmp_path / "cache") as fetcher:
        fetcher.tell(op="prepare", manifest=str(tmp_path / "none"), url=str(tmp_path / "one"))
        fetcher.tell(op="prepare", manifest=str(tmp_path / "one" / MANIFEST_NAME), url="hf://nothing")
        fetcher.tell(op="hold", id=1, manifest=str(tmp_path / "one" / MANIFEST_NAME), url="hf://nothing")
        assert fetcher.hear(1, "failed")["error"]["type"] == "source_error"
        fetcher.tell(
            op="hold", id=2, manifest=str(tmp_path / "one" / MANIFEST_NAME), url=str(tmp_path / "one")
        )
        assert fetcher.hear(2, "done")["bytes"] == manifest.total_bytes


def test_spare_files_are_given_back(tmp_path: Path) -> None:
    manifest = make(tmp_path / "one")
    with fetching(tmp_path / "cache") as fetcher:

        def hears_spare_bytes(expected: int) -> None:
            while sum(tier["spare_bytes"] for tier in fetcher.hear(0, "tiers")["tiers"]) != expected:
                pass

        order = {"manifest": str(tmp_path / "one" / MANIFEST_NAME), "url": str(tmp_path / "one")}
        fetcher.tell(op="hold", id=1, copied=True, **order)
        fetcher.hear(1, "done")
        assert list((tmp_path / "cache").rglob("model.safetensors"))
        fetcher.tell(op="release", id=1)
        fetcher.tell(op="drop", digests=[manifest.digest])
        hears_spare_bytes(manifest.shards[0].size_bytes)
        fetcher.tell(op="give_back", keep=[])
        hears_spare_bytes(0)
