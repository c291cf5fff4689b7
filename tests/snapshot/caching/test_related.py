"""A fetch copies the chunks that the node has in another snapshot of the same realm, if their bytes are right."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest
from fault_server import FaultServer
from hypothesis import given
from hypothesis import strategies as some
from pilotflame.errors import CacheError, Cancelled
from pilotflame.snapshot.caching.cache import Cache
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.format.create import create, observe
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest
from pilotflame.snapshot.format.verify import verify
from pilotflame.snapshot.sources.http import HttpSource
from pilotflame.snapshot.sources.realm import realm_of
from pilotflame.snapshot.sources.source import ObjectInfo
from pulling import CHUNK_BYTES, LIMIT_S, Stopping, StoppingConnection, check, make
from safetensors.numpy import load_file, save_file

ROOMY = 64 << 20
REALM, OTHER = realm_of("s3://bucket/one"), realm_of("s3://another/one")


def revise(before: Path, after: Path, tensor: str) -> Manifest:
    """Make a second revision in folder `after`, which differs from the first in one tensor. Return its manifest."""
    arrays = load_file(before / "model.safetensors")
    arrays[tensor] = ~arrays[tensor]
    after.mkdir()
    save_file(arrays, after / "model.safetensors")
    manifest = create(after, chunk_bytes=CHUNK_BYTES)
    manifest.write(after / MANIFEST_NAME)
    return manifest


def changed_bytes(before: Manifest, after: Manifest) -> int:
    known = set(before.shards[0].chunks)
    return CHUNK_BYTES * sum(digest not in known for digest in after.shards[0].chunks)


class Revisions:
    """Two revisions. The first one is in the tiers, fetched in REALM."""

    def __init__(self, folder: Path, tiers: list[Tier]) -> None:
        self.first = make(folder / "first").with_realm(REALM)
        self.second = revise(folder / "first", folder / "second", "t3").with_realm(REALM)
        self.folder, self.tiers = folder, tiers
        self.changed_bytes = changed_bytes(self.first, self.second)
        assert 2 * CHUNK_BYTES <= self.changed_bytes <= 3 * CHUNK_BYTES
        self.fetch_first(REALM)

    def fetch_first(self, realm: str) -> int:
        """Fetch the first revision. Return how many bytes the source served."""
        source = Stopping(self.folder / "first")
        with Cache(self.tiers).open(self.first.with_realm(realm), source) as lease:
            lease.wait(LIMIT_S, copied=True)
        return source.given_bytes

    def fetch_second(self, realm: str = REALM) -> int:
        """Fetch the second revision and verify it. Return how many bytes the source served."""
        source = Stopping(self.folder / "second")
        with Cache(self.tiers).open(self.second.with_realm(realm), source) as lease:
            lease.wait(LIMIT_S, copied=True)
            check(lease.root, self.folder / "second")
            verify(lease.root, self.second)
        return source.given_bytes


def test_a_chunk_is_copied_within_an_algorithm_only(tmp_path: Path) -> None:
    first, tiers = tmp_path / "first", [Tier(tmp_path / "tier", ROOMY)]

    def fetched_bytes(manifest: Manifest, folder: Path) -> int:
        source = Stopping(folder)
        with Cache(tiers).open(manifest.with_realm(REALM), source) as lease:
            lease.wait(LIMIT_S)
            check(lease.root, folder)
        return source.given_bytes

    fast = make(first)
    assert fetched_bytes(fast, first) == fast.total_bytes
    safe = create(first, chunk_bytes=CHUNK_BYTES, algorithm="sha256")
    assert fetched_bytes(safe, first) == safe.total_bytes
    after = tmp_path / "after"
    revise(first, after, "t3")
    again = create(after, chunk_bytes=CHUNK_BYTES, algorithm="sha256")
    assert fetched_bytes(again, after) == changed_bytes(safe, again) < again.total_bytes


@pytest.fixture
def revisions(tmp_path: Path) -> Revisions:
    return Revisions(tmp_path, [Tier(tmp_path / "tier", ROOMY)])


@pytest.mark.parametrize("kind", ["tmpfs", "disk"])
def test_only_what_another_revision_does_not_have_is_fetched(
    shm: Path, tmp_path: Path, kind: Literal["tmpfs", "disk"]
) -> None:
    tier = Tier(shm / "tier" if kind == "tmpfs" else tmp_path / "tier", ROOMY, kind, spare_bytes=ROOMY)
    revisions = Revisions(tmp_path, [tier])
    assert revisions.fetch_second() == revisions.changed_bytes
    # Fetch the first revision again. It copies chunks from the second one, into files made of spares.
    tier.evict(revisions.first.digest)
    source = Stopping(tmp_path / "first")
    with Cache([tier]).open(revisions.first, source) as lease:
        lease.wait(LIMIT_S)
        check(lease.root, tmp_path / "first")
        assert lease.stats is not None
        assert lease.stats.fetched_bytes == source.given_bytes
    assert source.given_bytes == revisions.changed_bytes


@pytest.mark.parametrize("realm", [OTHER, ""])
def test_nothing_is_taken_from_another_realm(revisions: Revisions, realm: str) -> None:
    assert revisions.fetch_second(realm) == revisions.second.total_bytes


def test_bytes_that_went_bad_are_fetched(revisions: Revisions) -> None:
    file = revisions.tiers[0].folder(revisions.first.digest) / "files" / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(CHUNK_BYTES + 7)
        stream.write(b"\x01\x02\x03")
    assert revisions.fetch_second() == revisions.changed_bytes + CHUNK_BYTES


@pytest.mark.parametrize("damage", ["cut", "no file", "manifest"])
def test_a_damaged_snapshot_is_no_fault_of_the_next_one(revisions: Revisions, damage: str) -> None:
    files = revisions.tiers[0].folder(revisions.first.digest) / "files"
    if damage == "cut":
        with (files / "model.safetensors").open("r+b") as stream:
            stream.truncate(CHUNK_BYTES)
    elif damage == "no file":
        (files / "model.safetensors").unlink()
    else:
        (files / MANIFEST_NAME).write_text('{"shards": [{"chunks": 3}]}')
    given_bytes = revisions.fetch_second()
    kept_bytes = CHUNK_BYTES if damage == "cut" else 0
    assert given_bytes == revisions.second.total_bytes - kept_bytes


def test_an_incomplete_snapshot_lends_nothing(tmp_path: Path, revisions: Revisions) -> None:
    (revisions.tiers[0].folder(revisions.first.digest) / "files" / MANIFEST_NAME).unlink()
    assert revisions.fetch_second() == revisions.second.total_bytes


def test_the_copy_on_the_disk_is_of_the_same_realm(shm: Path, tmp_path: Path) -> None:
    fast, slow = Tier(shm / "fast", ROOMY, "tmpfs"), Tier(tmp_path / "slow", ROOMY)
    revisions = Revisions(tmp_path, [fast, slow])
    fast.evict(revisions.first.digest)
    assert revisions.fetch_second() == revisions.changed_bytes


def test_a_realm_does_not_use_what_another_one_has_fetched(tmp_path: Path, revisions: Revisions) -> None:
    """Write access to one place must not decide the bytes that the functions of another place get."""
    tier, other = revisions.tiers[0], revisions.first.with_realm(OTHER)
    weights = tier.folder(revisions.first.digest) / "files" / "model.safetensors"
    with weights.open("r+b") as stream:
        # Write other bytes. They stand for bytes with the same digests, which no check would find.
        stream.seek(CHUNK_BYTES)
        stream.write(b"poison")
    assert revisions.fetch_first(OTHER) == revisions.first.total_bytes
    check(tier.folder(other.digest) / "files", tmp_path / "first")
    assert revisions.fetch_first(REALM) == 0
    assert {stored.digest for stored in tier.list()} == {revisions.first.digest, other.digest}


def test_a_realm_does_not_follow_or_continue_the_fetch_of_another_one(
    tmp_path: Path, revisions: Revisions
) -> None:
    tier, others = revisions.tiers[0], revisions.first.with_realm(OTHER)
    tier.evict(revisions.first.digest)
    with Cache([tier]).open(others, Stopping(tmp_path / "first", stop_at=3 * CHUNK_BYTES)) as lease:
        lease.arrival.wait(0, 1, LIMIT_S)
        assert revisions.fetch_first(REALM) == revisions.first.total_bytes


def test_closing_ends_the_copying_and_keeps_what_landed(tmp_path: Path, revisions: Revisions) -> None:
    stopping = Stopping(tmp_path / "second", stop_at=0)
    lease = Cache(revisions.tiers).open(revisions.second, stopping)
    lease.arrival.wait(0, 0, LIMIT_S)
    lease.close()
    with pytest.raises(Cancelled):
        lease.wait(LIMIT_S)
    assert revisions.fetch_second() <= revisions.changed_bytes


def test_a_snapshot_that_lends_is_not_evicted_meanwhile(tmp_path: Path, revisions: Revisions) -> None:
    stopping = Stopping(tmp_path / "second", stop_at=0)
    with Cache(revisions.tiers).open(revisions.second, stopping) as lease:
        lease.arrival.wait(0, 0, LIMIT_S)
        with pytest.raises(CacheError, match="in use"):
            revisions.tiers[0].evict(revisions.first.digest)
        stopping.go()
        lease.wait(LIMIT_S)
        revisions.tiers[0].evict(revisions.first.digest)
        check(lease.root, tmp_path / "second")


def test_memory_that_becomes_full_while_copying_hands_over_to_the_disk(shm: Path, tmp_path: Path) -> None:
    small = shm / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "none", small], check=False)
    if mounted.returncode:
        pytest.skip("no right to mount")
    try:
        slow = Tier(tmp_path / "slow", ROOMY)
        revisions = Revisions(tmp_path, [slow])
        full = Overcommitted(small / "tier", ROOMY, "tmpfs")
        revisions.tiers = [full, slow]
        # Chunks that had just been received when the memory was full are received again.
        assert revisions.fetch_second() <= 2 * revisions.changed_bytes
        assert slow.ready(revisions.second.digest, revisions.second) is not None
    finally:
        subprocess.run(["umount", "-l", small], check=True)


class Overcommitted(Tier):
    """A tier that does not see that its file system has too little room."""

    def _available_bytes(self, stored: object) -> int:
        return ROOMY


def test_a_revision_whose_header_is_longer_is_fetched_whole(tmp_path: Path, revisions: Revisions) -> None:
    """The same tensors at other offsets make other chunks."""
    moved = tmp_path / "moved"
    moved.mkdir()
    arrays = load_file(tmp_path / "first" / "model.safetensors")
    save_file(arrays, moved / "model.safetensors", metadata={"trained": "for longer"})
    revisions.second = create(moved, chunk_bytes=CHUNK_BYTES).with_realm(REALM)
    stopping = Stopping(moved)
    with Cache(revisions.tiers).open(revisions.second, stopping) as lease:
        lease.wait(LIMIT_S)
        check(lease.root, moved)
    assert stopping.given_bytes == revisions.second.total_bytes


class Tagged(Stopping):
    """A store that gives every object the version `tag`, and says that the version depends only on the bytes, as S3 and the hub do."""

    versioned_by_content = True

    def __init__(self, root: Path, tag: str) -> None:
        super().__init__(root)
        self.tag = tag

    def stat(self, name: str) -> ObjectInfo:
        return ObjectInfo(super().stat(name).size_bytes, self.tag)

    def connect(self) -> Any:
        return _TaggedConnection(self)


class _TaggedConnection(StoppingConnection):
    def __init__(self, source: Tagged) -> None:
        super().__init__(source)
        self._tag = source.tag

    def begin(self, name: str, begin: int, end: int, version: str = "") -> ObjectInfo:
        assert version in {"", self._tag}
        return ObjectInfo(super().begin(name, begin, end).size_bytes, self._tag)


@pytest.mark.parametrize(
    "tag", ["0" * 32, "0" * 32 + "-1", "65f1a2b3-400000", "1f" * 16, "e1" * 32, "1f" * 16 + "-7"]
)
def test_only_a_version_that_is_a_hash_tells_that_bytes_are_the_same(tmp_path: Path, tag: str) -> None:
    first, cache = make(tmp_path / "first"), Cache([Tier(tmp_path / "tier", ROOMY)])
    revise(tmp_path / "first", tmp_path / "second", "t3")
    given = []
    for name in ("first", "second"):
        source = Tagged(tmp_path / name, f'"{tag}"')
        manifest = observe(source, ["model.safetensors"]).with_realm(REALM)
        with cache.open(manifest, source) as lease:
            lease.wait(LIMIT_S)
            if not is_hash(tag):
                check(lease.root, tmp_path / name)
        given.append(source.given_bytes)
    assert given == [first.total_bytes, 0 if is_hash(tag) else first.total_bytes]


def is_hash(tag: str) -> bool:
    return tag.startswith(("1f", "e1"))


def test_a_web_servers_versions_do_not_say_that_bytes_are_the_same(tmp_path: Path) -> None:
    make(tmp_path / "first")
    revise(tmp_path / "first", tmp_path / "second", "t3")
    cache = Cache([Tier(tmp_path / "tier", ROOMY)])
    # All objects of this server have the same ETag, so equal ETags must not count as equal bytes.
    with FaultServer(tmp_path) as server:
        for name in ("first", "second"):
            url = f"{server.url}/{name}"
            manifest = observe(HttpSource(url), ["model.safetensors"]).with_realm(REALM)
            with cache.open(manifest, HttpSource(url)) as lease:
                lease.wait(LIMIT_S)
                check(lease.root, tmp_path / name)
                assert lease.stats is not None
                assert lease.stats.fetched_bytes == manifest.total_bytes


# -- realms


SECRETS = some.dictionaries(
    some.sampled_from(
        ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PILOTFLAME_SNAPSHOT_TOKEN", "OTHER"]
    ),
    some.text(max_size=5),
)
PLACES = some.sampled_from([
    "s3://one/a", "s3://one/b/c", "s3://two/a", "gs://one/a", "az://one/a",
    "hf://org/base@main", "hf://org/tune", "hf://me/tune",
    "https://host/models/v1", "https://host/models/v2", "https://host/others/v1", "http://host/models/v1",
    "https://host/models", "https://host/others", "https://host", "https://host/models/v1?sig=1", "https://u:p@host/models/v1", "https://u:q@host/models/v2",
])  # fmt: skip
SAME = [{"s3://one/a", "s3://one/b/c"}, {"hf://org/base@main", "hf://org/tune"}]
SAME += [{"https://host/models/v1", "https://host/models/v2"}]
SAME += [{"https://host/models", f"https://host/models/v{number}"} for number in (1, 2)]
SAME += [{"https://host/others", "https://host/others/v1"}]


@given(PLACES, PLACES, SECRETS, SECRETS)
def test_a_realm_is_a_place_with_its_credentials(
    one: str, two: str, secrets: dict[str, str], others: dict[str, str]
) -> None:
    family = {"s3": "AWS_", "hf": "HF_", "http": "PILOTFLAME_", "https": "PILOTFLAME_"}.get(
        one.partition(":")[0], "-"
    )

    def own(given: dict[str, str]) -> dict[str, str]:
        return {name: value for name, value in given.items() if name.startswith(family)}

    same = one == two or {one, two} in SAME
    assert (realm_of(one, secrets) == realm_of(two, others)) == (same and own(secrets) == own(others))


def test_a_file_is_of_the_realm_of_its_folder_and_a_local_folder_of_none() -> None:
    assert realm_of("https://host/models/v1/model.safetensors") == realm_of("https://host/models/v2/")
    assert realm_of("/weights") == ""
    points = "s3://arn:aws:s3:us-east-1:1:accesspoint"
    assert realm_of(f"{points}/one/a") == realm_of(f"{points}/one/b") != realm_of(f"{points}/two/a")


def test_folders_at_the_root_of_a_web_server_may_belong_to_others() -> None:
    ours = realm_of("https://store/bucket")
    assert ours == realm_of("https://store/bucket/model.safetensors") == realm_of("https://store/bucket/v2")
    assert ours not in {realm_of("https://store/other"), realm_of("https://store/other/m.safetensors")}
    assert ours != realm_of("https://store/model.safetensors")


def test_the_credentials_of_the_gateway_make_another_realm_than_those_of_a_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "gateway")
    ours = realm_of("s3://bucket/a")
    assert ours != realm_of("s3://bucket/a", {"AWS_ACCESS_KEY_ID": "gateway"})
    assert ours == realm_of("s3://bucket/b", {"HF_TOKEN": "function"})
    # If the operator changes the gateway's own credentials, the realm stays the same, and the cache stays useful.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    assert ours == realm_of("s3://bucket/a")
