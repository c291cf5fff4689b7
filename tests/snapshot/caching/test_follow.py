"""Following a fetch: the feed announces chunks when they land, and the end. Followers send demands to the feed."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pilotflame.errors import CacheError, LinkError, SnapshotCorrupt
from pilotflame.snapshot.caching.follow import MAX_FOLLOWERS, Feed, Following
from pilotflame.snapshot.fetching.arrival import Arrival
from pilotflame.snapshot.format.manifest import Manifest, Shard

LIMIT_S = 20.0
COUNT = 20_000


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    shard = Shard(
        name="a.safetensors", size_bytes=COUNT << 12, data_offset_bytes=8, chunks=("0" * 32,) * COUNT
    )
    return Manifest(chunk_bytes=1 << 12, shards=(shard,), tensors=())


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


class Hearing:
    """A Following that runs in a thread."""

    def __init__(self, folder: int, manifest: Manifest) -> None:
        self.arrival = Arrival(manifest)
        self.following = Following(folder)
        self.published: bool | None = None
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.published = self.following.run(self.arrival)
        except (SnapshotCorrupt, LinkError) as error:
            self.error = error

    def end(self) -> None:
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()


def test_what_landed_before_and_after_is_told(folder: int, manifest: Manifest) -> None:
    arrival = Arrival(manifest)
    for chunk in range(0, COUNT, 2):
        arrival.land(chunk)
    feed = Feed(folder, arrival)
    early = Hearing(folder, manifest)
    early.arrival.wait(0, 0, LIMIT_S)
    arrival.land(1)
    early.arrival.wait(0, 2, LIMIT_S)
    assert not early.arrival.landed(3)
    late = Hearing(folder, manifest)
    for chunk in range(3, COUNT, 2):
        arrival.land(chunk)
    for hearing in (early, late):
        hearing.arrival.wait(0, COUNT - 1, LIMIT_S)
        assert hearing.published is None
    feed.close()
    for hearing in (early, late):
        hearing.end()
        assert hearing.published is True


def test_who_only_just_connected_hears_the_end(folder: int, manifest: Manifest) -> None:
    arrival = Arrival(manifest)
    arrival.land(7)
    feed = Feed(folder, arrival)
    followings = [Following(folder) for _ in range(5)]
    feed.close(SnapshotCorrupt("Chunk 8 differs.", details={"chunk": 8}))
    for following in followings:
        heard = Arrival(manifest)
        with pytest.raises(SnapshotCorrupt, match="Chunk 8 differs") as caught:
            following.run(heard)
        assert caught.value.details == {"chunk": 8}
        assert heard.landed(7)


def test_an_error_too_long_for_a_message_still_arrives(folder: int, manifest: Manifest) -> None:
    feed = Feed(folder, Arrival(manifest))
    following = Following(folder)
    feed.close(SnapshotCorrupt("Chunk 8 differs.", details={"tensors": ["x" * 1000] * 100}))
    with pytest.raises(SnapshotCorrupt, match="Chunk 8 differs"):
        following.run(Arrival(manifest))


def test_what_is_waited_for_is_demanded_of_who_fetches(folder: int, manifest: Manifest) -> None:
    arrival, heard = Arrival(manifest), threading.Event()
    demands: list[tuple[int, int]] = []

    def demanded(first: int, last: int) -> None:
        demands.append((first, last))
        heard.set()

    arrival.on_demand(demanded)
    feed = Feed(folder, arrival)
    hearing = Hearing(folder, manifest)
    hearing.following.demand(4, 9)
    assert heard.wait(LIMIT_S)
    heard.clear()
    # Demands that name no chunk of the snapshot are ignored.
    hearing.following.demand(5, COUNT)
    hearing.following.demand(3, 2)
    hearing.following.demand(1, 1)
    assert heard.wait(LIMIT_S)
    assert demands == [(4, 9), (1, 1)]
    feed.close()
    hearing.end()


def test_dropped_is_not_ended(folder: int, manifest: Manifest) -> None:
    feed = Feed(folder, Arrival(manifest))
    hearing = Hearing(folder, manifest)
    feed.close(dropped=True)
    hearing.end()
    assert hearing.published is False
    assert not hearing.arrival.complete
    with pytest.raises((ConnectionError, FileNotFoundError)):
        Following(folder)


def test_a_follower_can_be_cancelled(folder: int, manifest: Manifest) -> None:
    feed = Feed(folder, Arrival(manifest))
    hearing = Hearing(folder, manifest)
    hearing.following.cancel()
    hearing.end()
    assert hearing.published is False
    feed.close()


def test_a_follower_that_does_not_listen_holds_up_nobody(folder: int, manifest: Manifest) -> None:
    arrival = Arrival(manifest)
    feed = Feed(folder, arrival)
    deaf = [Following(folder) for _ in range(3)]
    hearing = Hearing(folder, manifest)
    for chunk in range(COUNT):
        # The feed sends up to 20,000 messages of one number. They do not fit into the buffers of the sockets that nobody reads.
        arrival.land(chunk)
    hearing.arrival.wait(0, COUNT - 1, LIMIT_S)
    for following in deaf:
        following.close()
    feed.close()
    hearing.end()
    assert hearing.published is True


@pytest.mark.parametrize("message", [b"?", b"L123", b"L\xff\xff\xff\xff"])
def test_nonsense_is_refused(folder: int, manifest: Manifest, tmp_path: Path, message: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"/proc/self/fd/{folder}/socket")
        listener.listen(1)
        following = Following(folder)
        with listener.accept()[0] as peer:
            peer.send(message)
            with pytest.raises(LinkError):
                following.run(Arrival(manifest))


def test_a_socket_left_by_one_that_was_killed_is_replaced(
    folder: int, manifest: Manifest, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(f"/proc/self/fd/{folder}/socket")
    with pytest.raises(ConnectionError):
        Following(folder)
    feed = Feed(folder, Arrival(manifest))
    following = Following(folder)
    feed.close()
    assert following.run(Arrival(manifest))
    assert not (tmp_path / "socket").exists()


def test_only_so_many_may_follow(folder: int, manifest: Manifest) -> None:
    """Without a limit, a container's handler could use up the descriptors of the process that fetches for all functions."""
    arrival = Arrival(manifest)
    feed = Feed(folder, arrival)
    hearing = Hearing(folder, manifest)
    arrival.land(0)
    hearing.arrival.wait(0, 0, LIMIT_S)
    others = [Following(folder) for _ in range(MAX_FOLLOWERS - 1)]
    refused = Following(folder)
    with pytest.raises(CacheError, match="already"):
        refused.run(Arrival(manifest))
    arrival.land(1)
    hearing.arrival.wait(0, 1, LIMIT_S)
    for following in others:
        following.close()
    feed.close()
    hearing.end()
    assert hearing.published is True


def test_a_feed_without_descriptors_rests_and_goes_on(folder: int, manifest: Manifest) -> None:
    arrival = Arrival(manifest)
    feed = Feed(folder, arrival)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    following = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    used = os.dup(folder)
    os.close(used)
    try:
        # The lowest free descriptor is over the limit, so the feed cannot accept the connection.
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        began_s = time.process_time()
        following.connect(f"/proc/self/fd/{folder}/socket")
        following.settimeout(0.4)
        with pytest.raises(TimeoutError):
            following.recv(1)
        assert time.process_time() - began_s < 0.2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    arrival.land(7)
    following.settimeout(LIMIT_S)
    assert following.recv(100) == b"L\0\0\0\7"
    following.close()
    feed.close()
