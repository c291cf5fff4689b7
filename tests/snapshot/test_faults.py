"""Every fault of the fault server, over real sockets: a fetch is right bit for bit, or its error names what is missing."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_server import Faults, FaultServer, Request
from pilotflame.errors import (
    FetchFailed,
    PilotflameError,
    SnapshotChanged,
    SnapshotCorrupt,
    SourceDenied,
    SourceError,
    SourceMissing,
)
from pilotflame.snapshot.caching.cache import Cache
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.fetching.arrival import Arrival
from pilotflame.snapshot.fetching.fetch import FetchStats, fetch
from pilotflame.snapshot.fetching.landing import ShardTarget
from pilotflame.snapshot.format.create import create, observe
from pilotflame.snapshot.format.digests import XXH3
from pilotflame.snapshot.format.discover import find_manifest
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest
from pilotflame.snapshot.restoring.mapping import Mapping
from pilotflame.snapshot.restoring.plan import make_plan, restore
from pilotflame.snapshot.sources import http, retries
from pilotflame.snapshot.sources.http import HttpSource
from safetensors.torch import load_file, save_file
from torch import nn

CHUNK = 64 << 10
LIMIT_S = 30.0
STALL_S = 0.5
"""Longer than the stall limit of a near source. So a stalled connection is replaced, and no test waits for the end of the stall."""
# Odd, so that hardly a tensor begins or ends where a chunk does.
WIDTH = 293
GROUPS = ([0, 1, 2], [3, 4], [5])
"""Layers of each shard: 1.0, 0.7 and 0.3 MB."""
Choose = Callable[[Request], Faults]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(sum(map(len, GROUPS))))


@dataclass(frozen=True)
class Weights:
    """A snapshot in a folder, and its tensors as they were saved."""

    folder: Path
    manifest: Manifest
    tensors: dict[str, torch.Tensor]

    @property
    def shards(self) -> list[str]:
        return [shard.name for shard in self.manifest.shards]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = tmp_path_factory.mktemp("weights")
    generator = torch.Generator().manual_seed(11)
    shapes = {name: tensor.shape for name, tensor in Net().state_dict().items()}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    places = {}
    for number, group in enumerate(GROUPS):
        held = {name: made for name, made in tensors.items() if int(name.split(".")[1]) in group}
        save_file(held, folder / f"model-{number}.safetensors")
        places |= dict.fromkeys(held, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text('{"width": 293}')
    manifest = create(folder, chunk_bytes=CHUNK)
    manifest.write(folder / MANIFEST_NAME)
    return Weights(folder, manifest, tensors)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    # Let attempts follow each other at once. Other tests check the waits between attempts.
    monkeypatch.setattr(retries, "FIRST_DELAY_S", 0.0005)


@contextmanager
def files_in(folder: Path, manifest: Manifest) -> Iterator[list[ShardTarget]]:
    opened = []
    folder.mkdir(exist_ok=True)
    try:
        for shard in manifest.shards:
            descriptor = os.open(folder / shard.name, os.O_RDWR | os.O_CREAT)
            opened.append(ShardTarget(shard.name, descriptor, XXH3))
            os.ftruncate(descriptor, shard.size_bytes)
        yield opened
    finally:
        for target in opened:
            os.close(target.descriptor)


def fetched(weights: Weights, url: str, folder: Path, **how: Any) -> FetchStats:
    """Fetch from `url`. Check each tensor as the safetensors library reads it and as our own mapping shows it. Return the statistics."""
    arrival = Arrival(weights.manifest)
    options = {"connections": 4, "part_bytes": 2 * CHUNK, **how}
    with files_in(folder, weights.manifest) as targets:
        stats = fetch(weights.manifest, HttpSource(url), targets, arrival, **options)
    assert arrival.complete
    check(weights, folder)
    return stats


def check(weights: Weights, folder: Path) -> None:
    found = {name: made for shard in weights.shards for name, made in load_file(folder / shard).items()}
    with torch.device("meta"):
        net = Net()
    restore(make_plan(net, weights.manifest), Mapping(folder, weights.manifest))
    assert found.keys() == net.state_dict().keys() == weights.tensors.keys()
    for name, right in weights.tensors.items():
        assert torch.equal(found[name], right), name
        assert torch.equal(net.state_dict()[name], right), name


def refused(weights: Weights, url: str, folder: Path, **how: Any) -> PilotflameError:
    arrival = Arrival(weights.manifest)
    options = {"connections": 4, "part_bytes": 2 * CHUNK, **how}
    with files_in(folder, weights.manifest) as targets, pytest.raises(PilotflameError) as caught:
        fetch(weights.manifest, HttpSource(url), targets, arrival, **options)
    assert arrival.error is caught.value
    assert not arrival.complete
    return caught.value


def check_named(weights: Weights, error: PilotflameError) -> None:
    """Check that the error names the shard, the chunk and exactly the tensors in this chunk, in its message and in its details."""
    manifest = weights.manifest
    shard, chunk = weights.shards.index(error.details["shard"]), error.details["chunk"]
    begin, end = chunk * CHUNK, (chunk + 1) * CHUNK
    hit = [
        tensor.name
        for tensor in sorted(manifest.tensors, key=lambda tensor: tensor.offset_bytes)
        if tensor.shard == shard
        and tensor.offset_bytes < end
        and tensor.offset_bytes + tensor.size_bytes > begin
    ]
    assert error.details["tensors"] == hit
    assert hit
    for word in (weights.shards[shard], f"chunk {chunk} ", *hit[:3]):
        assert word in error.message
    assert error.remedy


def on_weights(faults: Faults) -> Choose:
    """Return a function that gives `faults` to requests for shards, and no faults to requests for assets."""
    return lambda request: faults if request.name.startswith("model-") else Faults()


# -- what passes is healed

PASSING = {
    "nothing": Faults(),
    "latency": Faults(latency_s=0.01),
    "slow": Faults(bytes_per_s=20e6),
    "silent before the head": Faults(stall_share=0.15, stall_s=STALL_S, times=1),
    "silent in the body": Faults(stall_share=0.15, stall_s=STALL_S, stall_at=20_000, times=1),
    "silent at the body's first byte": Faults(stall_share=0.1, stall_s=STALL_S, stall_at=0, times=1),
    "closed in the body": Faults(short_share=0.3),
    "reset in the body": Faults(reset_share=0.3),
    "503": Faults(busy_share=0.5, times=3),
    "503, asking for time": Faults(busy_share=0.5, times=3, retry_after="0"),
    "429, asking for time": Faults(busy_share=0.5, times=3, busy_status=429, retry_after="0"),
    "429 until a date that is past": Faults(
        busy_share=0.5, times=3, busy_status=429, retry_after="Sat, 21 Nov 2020 12:00:00 GMT"
    ),
    "500": Faults(busy_share=0.5, times=3, busy_status=500),
    "another range": Faults(wrong_range_share=0.3, times=2),
    "everything twice": Faults(duplicate_share=1.0),
    "some twice": Faults(duplicate_share=0.5),
    "everything twice, late": Faults(late_share=1.0),
    "some twice, late": Faults(late_share=0.4),
    "chunked": Faults(chunked=True),
    "chunked and closed in the body": Faults(chunked=True, short_share=0.3),
    "chunked and twice": Faults(chunked=True, duplicate_share=0.5),
    "closed after each, said": Faults(close_each=True),
    "closed after each, unsaid": Faults(close_each=True, close_said=False),
    "chunked, closed after each, unsaid": Faults(chunked=True, close_each=True, close_said=False),
    "a weak tag": Faults(etag="weak"),
    "a weak tag, broken off": Faults(etag="weak", reset_share=0.3),
    "no tag": Faults(etag=None),
    "no tag, broken off": Faults(etag=None, short_share=0.3),
}
RETRIED = ("closed in", "reset", "503", "429", "500", "another", "broken off")


@pytest.mark.parametrize("kind", PASSING)
def test_what_passes_is_healed_bit_for_bit(tmp_path: Path, weights: Weights, kind: str) -> None:
    with FaultServer(weights.folder, on_weights(PASSING[kind]), seed=3) as server:
        stats = fetched(weights, server.url, tmp_path)
    if any(word in kind for word in RETRIED):
        assert stats.retries > 0, "the fault never came"
    elif not PASSING[kind].duplicate_share and not PASSING[kind].late_share:
        # On a busy machine, a connection may count as stalled although the server sends. There must be no other retries.
        assert stats.retries == stats.stalls


@pytest.mark.parametrize("part_bytes", [CHUNK, 100_003, None])
@pytest.mark.parametrize("connections", [1, 16])
def test_broken_off_whatever_the_parts_and_connections(
    tmp_path: Path, weights: Weights, connections: int | None, part_bytes: int | None
) -> None:
    faults = Faults(short_share=0.2, reset_share=0.2)
    with FaultServer(weights.folder, on_weights(faults), seed=5) as server:
        stats = fetched(weights, server.url, tmp_path, connections=connections, part_bytes=part_bytes)
        sent = sum(request.sent for request in server.requests)
    assert stats.received_bytes == weights.manifest.total_bytes <= sent, "what had come was fetched again"


def test_a_flipped_bit_is_fetched_once_more(tmp_path: Path, weights: Weights) -> None:
    faults = Faults(flip_share=0.3, times=1)
    with FaultServer(weights.folder, on_weights(faults), seed=1) as server:
        stats = fetched(weights, server.url, tmp_path, part_bytes=CHUNK)
        again = [request for request in server.requests if request.repetition]
    assert again
    assert all(request.repetition == 1 for request in again)
    assert stats.received_bytes == weights.manifest.total_bytes + sum(
        request.end - request.begin for request in again
    )


def test_a_flipped_bit_in_a_chunk_of_two_parts_is_found_when_it_is_whole(
    tmp_path: Path, weights: Weights
) -> None:
    """Such a chunk is not hashed while it is received, but from the file when both parts have come."""
    name, flipped = weights.shards[0], Counter[int]()

    def once(request: Request) -> Faults:
        first = request.name == name and request.begin == CHUNK // 2 and not flipped[0]
        flipped[0] += first
        return Faults(flip_share=float(first))

    with FaultServer(weights.folder, once) as server:
        fetched(weights, server.url, tmp_path, part_bytes=CHUNK // 2)
        asked = Counter((request.name, request.begin) for request in server.requests)
    assert flipped[0] == 1
    assert asked[name, 0] == asked[name, CHUNK // 2] == 2


def test_redirects_are_followed(tmp_path: Path, weights: Weights) -> None:
    with FaultServer(weights.folder) as there, FaultServer({}) as here:
        here.faults = Faults(redirect=there.url + "/")
        fetched(weights, here.url, tmp_path)
        assert {request.name for request in here.requests} == set(weights.shards)
        # The source remembers where a shard is. Only the first requests of the four connections may be redirected.
        assert len(here.requests) <= 4 * len(weights.shards)


def test_a_redirect_whose_end_breaks_off(tmp_path: Path, weights: Weights) -> None:
    faults = Faults(reset_share=0.3)
    with FaultServer(weights.folder, faults) as there, FaultServer({}) as here:
        here.faults = Faults(redirect=there.url + "/", redirect_status=307)
        assert fetched(weights, here.url, tmp_path).retries > 0


def test_a_tag_that_is_weak_now_and_then_is_the_same_version(tmp_path: Path, weights: Weights) -> None:
    """A proxy may weaken the tag (RFC 9110, 8.8.1); the opaque part still names the version."""
    with FaultServer(weights.folder) as server:
        # Two of three answers have the weak tag, and the others have the strong tag.
        server.faults = lambda request: Faults(headers={"ETag": 'W/"v0"'} if request.number % 3 else {})
        fetched(weights, server.url, tmp_path)


def test_the_time_that_a_server_asks_for_is_given(tmp_path: Path, weights: Weights) -> None:
    with FaultServer(weights.folder) as server:
        server.faults = lambda request: Faults(busy_share=float(request.number == 2), retry_after="1")
        assert fetched(weights, server.url, tmp_path).retries >= 1
        refused_one = server.requests[2]
        again = next(
            r for r in server.requests[3:] if (r.name, r.begin) == (refused_one.name, refused_one.begin)
        )
    # A lower bound, so a busy machine does not matter.
    assert again.when_s - refused_one.when_s >= 1.0


def test_without_ranges_a_file_in_one_piece_is_taken_whole(tmp_path: Path, weights: Weights) -> None:
    with FaultServer(weights.folder, Faults(ranges=False)) as server:
        fetched(weights, server.url, tmp_path, part_bytes=64 << 20)
        assert len(server.requests) == len(weights.shards)


@pytest.mark.parametrize("stall_at", [None, 0, 50_000])
@pytest.mark.parametrize("connections", [1, 3])
def test_a_silent_connection_is_replaced_by_a_new_one(
    tmp_path: Path, weights: Weights, connections: int, stall_at: int | None
) -> None:
    """There are more stalls than connections, but only few failures for each range."""

    def choose(request: Request) -> Faults:
        return Faults(stall_share=float(request.number in (1, 2, 6, 9)), stall_s=60.0, stall_at=stall_at)

    with FaultServer(weights.folder, choose) as server:
        stats = fetched(weights, server.url, tmp_path, connections=connections)
    assert stats.stalls >= 4
    assert stats.retries == stats.stalls


# -- what stays is refused, and named

LASTING = {
    "closed in the body": (Faults(short_share=1.0), "early|closed"),
    "reset in the body": (Faults(reset_share=1.0), "reset"),
    "503": (Faults(busy_share=1.0, retry_after="0"), "HTTP 503"),
    "429": (Faults(busy_share=1.0, busy_status=429), "HTTP 429"),
    "another range": (Faults(wrong_range_share=1.0), "another range"),
}


@pytest.mark.parametrize("kind", LASTING)
def test_what_never_comes_is_named(tmp_path: Path, weights: Weights, kind: str) -> None:
    faults, why = LASTING[kind]
    name = weights.shards[1]

    def choose(request: Request) -> Faults:
        touches = request.begin < 6 * CHUNK and request.end > 5 * CHUNK
        return faults if request.name == name and touches else Faults()

    with FaultServer(weights.folder, choose) as server:
        error = refused(weights, server.url, tmp_path)
    assert isinstance(error, FetchFailed)
    check_named(weights, error)
    assert error.details["shard"] == name
    # The chunks 4 and 5 are requested together, so the error may name either.
    assert error.details["chunk"] in (4, 5)
    assert any(word in error.message for word in why.split("|")), error.message


@pytest.mark.parametrize("part_bytes", [CHUNK, 3 * CHUNK])
def test_bytes_that_are_always_wrong_are_named(tmp_path: Path, weights: Weights, part_bytes: int) -> None:
    name, at = weights.shards[0], 7 * CHUNK

    def choose(request: Request) -> Faults:
        return Faults(flip_share=float(request.name == name and request.begin <= at < request.end))

    with FaultServer(weights.folder, choose) as server:
        error = refused(weights, server.url, tmp_path, part_bytes=part_bytes)
    assert isinstance(error, SnapshotCorrupt)
    check_named(weights, error)
    assert error.details["shard"] == name
    assert 7 * CHUNK // part_bytes * part_bytes // CHUNK <= error.details["chunk"] < 7 + part_bytes // CHUNK


def undigested(weights: Weights, url: str) -> Weights:
    """Return the same weights with a manifest that has the versions at `url` in place of digests."""
    return replace(
        weights, manifest=observe(HttpSource(url), [path.name for path in weights.folder.glob("model*")])
    )


@pytest.mark.parametrize("etag", ["strong", "weak", None])
@pytest.mark.parametrize("changed_from", [1, 5, 20])
def test_an_object_that_changes_is_not_mixed(
    tmp_path: Path, weights: Weights, etag: str | None, changed_from: int
) -> None:
    with FaultServer(weights.folder, Faults(etag=etag)) as server:
        observed = undigested(weights, server.url)
        server.faults = Faults(changed_from=len(server.requests) + changed_from, etag=etag)
        error = refused(observed, server.url, tmp_path, part_bytes=CHUNK)
    assert isinstance(error, SnapshotChanged)
    assert error.details["object"] in weights.shards
    assert error.details["object"] in error.message


def test_two_versions_in_the_first_answers_are_not_mixed(tmp_path: Path, weights: Weights) -> None:
    name = weights.shards[0]

    def choose(request: Request) -> Faults:
        if request.name != name:
            return Faults()
        return Faults(latency_s=0.1, changed_from=0 if request.begin else None)

    with FaultServer(weights.folder) as server:
        observed = undigested(weights, server.url)
        server.faults = choose
        error = refused(observed, server.url, tmp_path, part_bytes=8 * CHUNK)
    assert isinstance(error, SnapshotChanged)
    assert error.details["object"] == name


def test_other_bytes_of_the_same_size_are_refused_by_their_digests(tmp_path: Path, weights: Weights) -> None:
    name = weights.shards[0]
    with FaultServer({shard: (weights.folder / shard).read_bytes() for shard in weights.shards}) as server:
        content = dict(server.content)
        content[name] = content[name][:-5] + b"other"
        server.content = content
        error = refused(weights, server.url, tmp_path)
    assert isinstance(error, SnapshotCorrupt)
    assert error.details["shard"] == name


# -- what a server says about the bytes that it sends


@pytest.mark.parametrize("etag", ["strong", "weak", None])
def test_replicas_with_versions_of_their_own_serve_one_snapshot(
    tmp_path: Path, weights: Weights, etag: str | None
) -> None:
    """The versions differ, but the bytes match the digests of the manifest, which decide."""
    with FaultServer(weights.folder) as server:
        server.faults = lambda request: Faults(etag=etag, changed_from=0 if request.number % 2 else None)
        manifest = find_manifest(HttpSource(server.url))
        assert manifest.digest == weights.manifest.digest
        stats = fetched(weights, server.url, tmp_path)
        assert stats.retries == stats.stalls
        with cache_in(tmp_path / "cache").open(manifest, HttpSource(server.url)) as lease:
            lease.wait(LIMIT_S)
            check(weights, lease.root)


@pytest.mark.parametrize("status", [412, 400, 501])
@pytest.mark.parametrize("known", [True, False])
def test_a_server_that_refuses_conditions(tmp_path: Path, weights: Weights, status: int, known: bool) -> None:
    def choose(request: Request) -> Faults:
        return Faults(status=status if "if-match" in request.headers else None)

    with FaultServer(weights.folder, choose) as server:
        fetched(weights if known else undigested(weights, server.url), server.url, tmp_path)


@pytest.mark.parametrize(
    "said",
    [Faults(range_said=False), Faults(range_said=False, chunked=True), Faults(range_said=False, headers={"Content-Range": "bytes 0-0/*"})],
    ids=["length", "nothing", "no total"],
)  # fmt: skip
@pytest.mark.parametrize("known", [True, False])
def test_parts_that_do_not_say_their_place(
    tmp_path: Path, weights: Weights, said: Faults, known: bool
) -> None:
    def choose(request: Request) -> Faults:
        where = f"bytes {request.begin}-{request.end - 1}/*"
        return replace(said, headers=dict.fromkeys(said.headers, where))

    with FaultServer(weights.folder, choose) as server:
        found = weights if known else undigested(weights, server.url)
        fetched(found, server.url, tmp_path)
        assert (
            create(HttpSource(server.url), file=weights.shards[0], chunk_bytes=CHUNK).shards
            == weights.manifest.shards[:1]
        )


@pytest.mark.parametrize("known", [True, False])
def test_a_repeated_answer_without_its_place_is_taken_for_no_other(
    tmp_path: Path, weights: Weights, known: bool
) -> None:
    """All parts have the same size, so only their ranges distinguish them."""
    with FaultServer(weights.folder, seed=5) as server:
        found = weights if known else undigested(weights, server.url)
        server.faults = Faults(range_said=False, duplicate_share=0.4, late_share=0.4, times=2)
        fetched(found, server.url, tmp_path, part_bytes=CHUNK)


@pytest.mark.parametrize("known", [True, False])
def test_small_files_without_a_length(tmp_path: Path, weights: Weights, known: bool) -> None:
    def choose(request: Request) -> Faults:
        return Faults() if request.name in weights.shards else Faults(ranges=False, chunked=True)

    names = (
        "config.json",
        "model.safetensors.index.json",
        *weights.shards,
        *([MANIFEST_NAME] if known else []),
    )
    with FaultServer({name: (weights.folder / name).read_bytes() for name in names}, choose) as server:
        manifest = find_manifest(HttpSource(server.url))
        assert [asset.name for asset in manifest.assets] == list(names[:2])
        with cache_in(tmp_path).open(manifest, HttpSource(server.url)) as lease:
            lease.wait(LIMIT_S)
            check(weights, lease.root)
            assert (lease.root / "config.json").read_bytes() == (weights.folder / "config.json").read_bytes()


def test_a_large_file_without_a_length_is_refused_by_name(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_COUNTED_BYTES", 100_000)
    with (
        FaultServer(weights.folder, Faults(ranges=False, chunked=True)) as server,
        pytest.raises(SourceError, match="does not tell how large it is") as caught,
    ):
        HttpSource(server.url).stat(weights.shards[0])
    assert "Content-Length" in caught.value.remedy


@pytest.mark.parametrize(
    ("faults", "kind", "words"),
    [
        (Faults(ranges=False), SourceError, "not served in ranges"),
        (Faults(ranges=False, chunked=True), SourceError, "does not tell how large|not served in ranges"),
        (Faults(status=404), SourceMissing, "is not there"),
        (Faults(status=403, body="no"), SourceDenied, "may not be read"),
        (Faults(headers={"Content-Encoding": "gzip"}), SourceError, "Content-Encoding gzip"),
        (Faults(redirect="/elsewhere"), SourceError, "redirects more than"),
    ],
)
def test_a_server_that_cannot_serve_is_refused_at_once(
    tmp_path: Path, weights: Weights, faults: Faults, kind: type[SourceError], words: str
) -> None:
    with FaultServer(weights.folder, faults) as server:
        error = refused(weights, server.url, tmp_path)
        asked = len(server.requests)
    assert type(error) is kind
    assert any(word in error.message for word in words.split("|")), error.message
    assert error.remedy
    assert "redirects" in words or any(name in error.message for name in weights.shards)
    assert asked <= 4 * 6 * 2, "it was tried again"


@pytest.mark.parametrize("coding", ["aws-chunked", "", "identity", "AWS-Chunked, identity"])
def test_codings_that_leave_the_bytes_as_they_are(tmp_path: Path, weights: Weights, coding: str) -> None:
    """Some stores keep the Content-Encoding of the upload, but send the plain bytes."""
    with FaultServer(weights.folder, Faults(headers={"Content-Encoding": coding})) as server:
        source = HttpSource(server.url)
        assert find_manifest(source).digest == weights.manifest.digest
        created = create(source, file=weights.shards[0], chunk_bytes=CHUNK)
        assert created.shards == weights.manifest.shards[:1]
        fetched(weights, server.url, tmp_path)


@pytest.mark.parametrize("coding", ["gzip", "aws-chunked, gzip", "br,aws-chunked"])
def test_codings_that_change_the_bytes_are_refused(tmp_path: Path, weights: Weights, coding: str) -> None:
    with FaultServer(weights.folder, Faults(headers={"Content-Encoding": coding})) as server:
        assert f"Content-Encoding {coding}" in refused(weights, server.url, tmp_path).message
        with pytest.raises(SourceError, match="without compression"):
            find_manifest(HttpSource(server.url))


# -- mixtures


class Mixture:
    """Draws faults by seed, anew for each answer. Gives at most `most` bad answers to the requests that begin in one chunk."""

    def __init__(self, seed: int, most: int) -> None:
        drawn = random.Random(seed)
        share = [drawn.choice([0.0, 0.1, 0.4]) for _ in range(6)]
        self.most = most
        self.steady = Faults(
            latency_s=drawn.choice([0.0, 0.0, 0.005]),
            etag=drawn.choice(["strong", "strong", "weak", None]),
            chunked=drawn.random() < 0.3,
            close_each=drawn.random() < 0.3,
            close_said=drawn.random() < 0.5,
        )
        self.worst = replace(
            self.steady,
            short_share=share[0],
            reset_share=share[1],
            busy_share=share[2],
            busy_status=drawn.choice([429, 500, 503]),
            retry_after=drawn.choice([None, "0"]),
            wrong_range_share=share[3],
            duplicate_share=share[4],
            stall_share=share[5] / 8,
            stall_s=STALL_S,
            stall_at=drawn.choice([None, 0, 30_000]),
        )
        self.connections = drawn.choice([1, 3, 8, None])
        self.part_bytes = drawn.choice([CHUNK, 4 * CHUNK, 80_000])
        self.flips = drawn.random() < 0.7
        self._flipped: set[tuple[str, int]] = set()
        self._answers: Counter[tuple[str, int]] = Counter()

    def __call__(self, request: Request) -> Faults:
        if not request.name.startswith("model-"):
            return self.steady
        chunk = request.name, request.begin // CHUNK
        self._answers[chunk] += 1
        # A second wrong bit in a chunk is corruption. So only a request within one chunk gets a wrong bit, once for each chunk.
        within = (request.end - 1) // CHUNK == chunk[1]
        if self.flips and within and chunk[1] % 3 == 0 and chunk not in self._flipped:
            self._flipped.add(chunk)
            return replace(self.steady, flip_share=1.0)
        return self.worst if self._answers[chunk] <= self.most else self.steady


@pytest.mark.parametrize("seed", range(16))
def test_mixtures_that_pass_are_healed(tmp_path: Path, weights: Weights, seed: int) -> None:
    mixture = Mixture(seed, most=3)
    with FaultServer(weights.folder, mixture, seed=seed) as server:
        fetched(weights, server.url, tmp_path, connections=mixture.connections, part_bytes=mixture.part_bytes)


def test_mixtures_that_stay_are_healed_or_named(tmp_path: Path, weights: Weights) -> None:
    """The faults never end. A fetch gives complete weights, or an error that names what is missing."""
    outcomes: Counter[str] = Counter()
    for seed in range(100, 107):
        mixture = Mixture(seed, most=1 << 30)
        drawn = random.Random(seed)
        mixture.worst = replace(
            mixture.worst, stall_share=0.0, flip_share=drawn.choice([0.0, 0.0, 0.02]),
            reset_share=drawn.choice([0.1, 0.5]), wrong_range_share=drawn.choice([0.0, 0.5])
        )  # fmt: skip
        mixture.flips = False
        arrival, folder = Arrival(weights.manifest), tmp_path / str(seed)
        with (
            FaultServer(weights.folder, mixture, seed=seed) as server,
            files_in(folder, weights.manifest) as targets,
        ):
            try:
                fetch(weights.manifest, HttpSource(server.url), targets, arrival,
                      connections=mixture.connections, part_bytes=CHUNK)  # fmt: skip
            except (FetchFailed, SnapshotCorrupt) as error:
                check_named(weights, error)
                outcomes["named"] += 1
            else:
                check(weights, folder)
                outcomes["healed"] += 1
        check_landed(weights, folder, arrival)
    assert len(outcomes) == 2, f"only {outcomes}: it was too easy, or too hard"


def check_landed(weights: Weights, folder: Path, arrival: Arrival) -> None:
    """Check that every landed chunk is right, whatever happened to the other chunks."""
    for index, shard in enumerate(weights.manifest.shards):
        right, found = (weights.folder / shard.name).read_bytes(), (folder / shard.name).read_bytes()
        for chunk in range(len(shard.chunks)):
            if arrival.landed(arrival.chunks.at(index, chunk * CHUNK)):
                begin, end = chunk * CHUNK, (chunk + 1) * CHUNK
                assert found[begin:end] == right[begin:end], (shard.name, chunk)


# -- through the cache


def cache_in(folder: Path) -> Cache:
    return Cache([Tier(folder / "tier", 64 << 20)])


@pytest.mark.parametrize(
    "kind",
    ["latency", "silent in the body", "reset in the body", "503, asking for time", "another range", "some twice",
     "chunked", "closed after each, unsaid", "no tag"],
)  # fmt: skip
def test_the_cache_heals_what_passes(tmp_path: Path, weights: Weights, kind: str) -> None:
    with (
        FaultServer(weights.folder, PASSING[kind], seed=7) as server,
        cache_in(tmp_path).open(weights.manifest, HttpSource(server.url)) as lease,
    ):
        with torch.device("meta"):
            net = Net()
        # Map and restore the weights while they still arrive.
        mapping = Mapping(lease.root, weights.manifest, keep=lease.lock, arrival=lease.arrival)
        restore(make_plan(net, weights.manifest), mapping)
        lease.wait(LIMIT_S)
        check(weights, lease.root)
        assert all(torch.equal(net.state_dict()[name], right) for name, right in weights.tensors.items())
        assert (lease.root / "config.json").read_bytes() == (weights.folder / "config.json").read_bytes()


def test_the_cache_says_what_is_wrong_and_goes_on_from_there(tmp_path: Path, weights: Weights) -> None:
    name = weights.shards[1]

    def choose(request: Request) -> Faults:
        return Faults(flip_share=float(request.name == name))

    cache = cache_in(tmp_path)
    with FaultServer(weights.folder, choose) as server:
        with cache.open(weights.manifest, HttpSource(server.url)) as lease:
            for wait in (lease.wait, lambda: lease.arrival.wait(0, lease.arrival.count - 1, LIMIT_S)):
                with pytest.raises(SnapshotCorrupt) as caught:
                    wait()
                check_named(weights, caught.value)
            assert not (lease.root / MANIFEST_NAME).exists()
            landed = sum(lease.arrival.landed(chunk) for chunk in range(lease.arrival.count))
        server.faults = Faults()
        with cache.open(weights.manifest, HttpSource(server.url)) as lease:
            lease.wait(LIMIT_S)
            assert lease.stats is not None
            assert lease.stats.fetched_bytes <= weights.manifest.total_bytes - (landed - 3) * CHUNK
            check(weights, lease.root)


def test_an_asset_that_is_wrong_is_refused_by_name(tmp_path: Path, weights: Weights) -> None:
    with FaultServer(weights.folder) as server:
        server.faults = lambda request: Faults(flip_share=float(request.name == "config.json"))
        with pytest.raises(SnapshotCorrupt, match=r"config\.json"):
            cache_in(tmp_path).open(weights.manifest, HttpSource(server.url))


def test_an_asset_that_is_wrong_once_is_fetched_again(tmp_path: Path, weights: Weights) -> None:
    with FaultServer(weights.folder) as server:
        reads = Counter[int]()

        def choose(request: Request) -> Faults:
            whole = request.name == "config.json" and request.end - request.begin > 1
            reads[0] += whole
            return Faults(flip_share=float(whole and reads[0] == 1))

        server.faults = choose
        with cache_in(tmp_path).open(weights.manifest, HttpSource(server.url)) as lease:
            assert (lease.root / "config.json").read_bytes() == (weights.folder / "config.json").read_bytes()
            lease.wait(LIMIT_S)
        assert reads[0] == 2


def test_after_a_change_a_source_asked_anew_finds_the_old_bytes_or_says_so(
    tmp_path: Path, weights: Weights
) -> None:
    """At first, the object is longer, and the fetch fails. When the old bytes are back, the next open fetches them."""
    cache, name = cache_in(tmp_path), weights.shards[0]
    files = {path.name: path.read_bytes() for path in weights.folder.iterdir()}
    with FaultServer({**files, name: files[name] + b"x"}) as server:
        source = HttpSource(server.url)
        with (
            cache.open(weights.manifest, source) as lease,
            pytest.raises(SnapshotChanged, match="instead of"),
        ):
            lease.wait(LIMIT_S)
        server.content = files
        source.forget()
        with cache.open(weights.manifest, source) as lease:
            lease.wait(LIMIT_S)
            check(weights, lease.root)
