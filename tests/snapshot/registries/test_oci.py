"""Artifacts as snapshots, against Debian's docker-registry: layouts, logins, tokens, redirects and damaged layers."""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import torch
from pilotflame.addresses import Addresses
from pilotflame.errors import PilotflameError, SnapshotCorrupt, SourceDenied, SourceError, SourceMissing
from pilotflame.snapshot.caching.cache import Cache
from pilotflame.snapshot.caching.download import download
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.discover import find_manifest
from pilotflame.snapshot.format.manifest import MANIFEST_NAME
from pilotflame.snapshot.format.verify import verify
from pilotflame.snapshot.registries.oci import OciConnection, OciSource, is_plain
from pilotflame.snapshot.sources import http
from pilotflame.snapshot.sources.access import Access
from pilotflame.snapshot.sources.locate import open_source
from pilotflame.snapshot.sources.realm import realm_of
from registry_server import (
    CONFIG_TYPE,
    PASSWORD,
    TITLE,
    USER,
    WEIGHT_TYPE,
    Registry,
    auth_file,
    digest,
    registry,
    tar_of,
)
from safetensors.torch import save
from source_tests import LARGE, OBJECTS, SMALL, SourceTests, read

WEIGHTS = save({"a": torch.arange(2_500_000.0), "b": torch.ones(7, 3)})
"""10 MB: three chunks."""
FILES = {"model.safetensors": WEIGHTS, "config.json": b'{"layers": 1}', "tokenizer/vocab.txt": b"one\ntwo\n"}
CODE = {"train.py": b"print()", **FILES, "README.md": b"# net"}


@pytest.fixture(autouse=True)
def _bare(bare_environment: None) -> None:
    """Remove the logins of this machine."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry(tmp_path_factory.mktemp("open")) as found:
        yield found


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry(tmp_path_factory.mktemp("closed"), "basic") as found:
        push_raw(found, "org/net:v1")
        yield found


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry(tmp_path_factory.mktemp("signed"), "token") as found:
        push_raw(found, "org/net:v1")
        yield found


def push_raw(into: Registry, reference: str, files: dict[str, bytes] | None = None, by: str = TITLE) -> str:
    repository = reference.partition(":")[0]
    layers = [
        into.layer(repository, data, f"{WEIGHT_TYPE if 'safetensors' in name else CONFIG_TYPE}.raw", name, by)
        for name, data in (files or FILES).items()
    ]
    return into.push(reference, layers)


def check_download(url: str, folder: Path, files: dict[str, bytes] | None = None) -> None:
    source = open_source(url)
    manifest = find_manifest(source)
    download(manifest, source, folder)
    for name, data in (files or FILES).items():
        assert (folder / name).read_bytes() == data
    verify(folder, find_manifest(open_source(str(folder))))


class TestOciSource(SourceTests):
    @pytest.fixture
    def source(self, opened: Registry) -> OciSource:
        push_raw(opened, "org/tested:v1", OBJECTS)
        return OciSource(f"oci://{opened.host}/org/tested:v1")


class TestArchives(SourceTests):
    """The same files in two archives: the large file in one, and the small files in the other."""

    @pytest.fixture
    def source(self, opened: Registry) -> OciSource:
        small = tar_of({f"./{SMALL}": OBJECTS[SMALL], "config.json": OBJECTS["config.json"]})
        layers = [
            opened.layer("org/tested", tar_of({LARGE: OBJECTS[LARGE]}), f"{WEIGHT_TYPE}.tar"),
            opened.layer("org/tested", small, f"{CONFIG_TYPE}.tar", "small"),
        ]
        opened.push("org/tested:tar", layers)
        return OciSource(f"oci://{opened.host}/org/tested:tar")


def test_a_model_of_raw_layers_is_a_snapshot(opened: Registry, tmp_path: Path) -> None:
    push_raw(opened, "org/raw:v1", by="org.cncf.model.filepath")
    check_download(f"oci://{opened.host}/org/raw:v1", tmp_path / "net")


def test_a_model_of_archives_is_a_snapshot(opened: Registry, tmp_path: Path) -> None:
    """One archive has weights in two shards between other files, one has the rest."""
    shards = {f"{name}.safetensors": save({name: torch.rand(1_200_000)}) for name in "ab"}
    index = json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}).encode()
    files = {"x/first.bin": b"f" * 700, **shards, "config.json": b"{}", "last.bin": b"l" * 99}
    beside = {"model.safetensors.index.json": index, "tokenizer/" + "long" * 40 + ".txt": b"long"}
    layers = [
        opened.layer("org/tar", tar_of(files), f"{WEIGHT_TYPE}.tar"),
        opened.layer("org/tar", tar_of(beside), f"{CONFIG_TYPE}.tar"),
    ]
    opened.push("org/tar:v1", layers)
    check_download(f"oci://{opened.host}/org/tar:v1", tmp_path / "net", {**shards, **beside})


def test_a_folder_of_an_artifact_is_a_snapshot(opened: Registry, tmp_path: Path) -> None:
    push_raw(opened, "org/folders:v1", {f"one/{name}": data for name, data in FILES.items()})
    check_download(f"oci://{opened.host}/org/folders:v1/one", tmp_path / "net")
    source = open_source(f"oci://{opened.host}/org/folders:v1/one/model.safetensors")
    assert source.url == f"oci://{opened.host}/org/folders:v1/one"


def test_a_manifest_of_ours_is_used(opened: Registry, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    manifest = create(tmp_path)
    push_raw(opened, "org/ours:v1", {"model.safetensors": WEIGHTS, MANIFEST_NAME: manifest.to_json()})
    found = find_manifest(open_source(f"oci://{opened.host}/org/ours:v1"))
    assert (found.digest, found.observed) == (manifest.digest, None)
    check_download(f"oci://{opened.host}/org/ours:v1", tmp_path / "net", {"model.safetensors": WEIGHTS})


def test_a_tag_that_moves_does_not_move_what_was_pinned(opened: Registry) -> None:
    before = push_raw(opened, "org/moves:v1")
    url = f"oci://{opened.host}/org/moves:v1"
    source = OciSource(url)
    assert source.pinned() == f"{url}@{before}"
    after = push_raw(opened, "org/moves:v1", {"model.safetensors": save({"a": torch.zeros(9)})})
    assert find_manifest(source).total_bytes == len(WEIGHTS), "files of two artifacts would be mixed"
    assert find_manifest(open_source(source.pinned())).total_bytes == len(WEIGHTS)
    assert OciSource(url).pinned() == f"{url}@{after}"
    source.forget()
    assert source.pinned() == f"{url}@{after}"


def test_an_index_of_one_manifest_is_followed(opened: Registry) -> None:
    inner = push_raw(opened, "org/index:inner")
    kind = "application/vnd.oci.image.index.v1+json"
    entry = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": inner, "size": 1}
    text = json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": [entry]}).encode()
    assert httpx.put(
        f"http://{opened.host}/v2/org/index/manifests/v1", content=text, headers={"Content-Type": kind}
    ).is_success
    source = OciSource(f"oci://{opened.host}/org/index:v1")
    assert source.names() == sorted(FILES)
    assert source.pinned().endswith(digest(text))


def test_the_same_layer_under_another_tag_is_not_fetched_again(opened: Registry, tmp_path: Path) -> None:
    push_raw(opened, "org/twice:v1")
    push_raw(opened, "org/twice:v2", {**FILES, "config.json": b'{"layers": 2}'})
    cache, fetched = Cache([Tier(tmp_path / "tier", 64 << 20)]), []
    for tag in ("v1", "v2"):
        url = f"oci://{opened.host}/org/twice:{tag}"
        source = open_source(url)
        with cache.open(find_manifest(source).with_realm(realm_of(url)), source) as lease:
            lease.wait(30)
            assert lease.stats is not None
            fetched.append(lease.stats.fetched_bytes)
    assert fetched == [len(WEIGHTS), 0]


# -- damage


@pytest.mark.parametrize("archived", [False, True])
def test_a_damaged_layer_is_named_and_nothing_is_published(
    opened: Registry, tmp_path: Path, archived: bool
) -> None:
    """The damage is in the values of a tensor, so only the digest of the layer shows it."""
    weights = save({"a": torch.rand(2_500_000)})
    data = tar_of({"first": b"1", "model.safetensors": weights}) if archived else weights
    kind, name = (f"{WEIGHT_TYPE}.tar", "") if archived else (f"{WEIGHT_TYPE}.raw", "model.safetensors")
    opened.push("org/bad:v1", [opened.layer("org/bad", data, kind, name)])
    opened.damage(data, len(data) // 2)
    source = open_source(f"oci://{opened.host}/org/bad:v1")
    manifest = find_manifest(source)
    with pytest.raises(SnapshotCorrupt, match=digest(data)) as caught:
        download(manifest, source, tmp_path / "net")
    assert "model.safetensors" in caught.value.message
    assert not (tmp_path / "net" / MANIFEST_NAME).exists()
    cache = Cache([Tier(tmp_path / "tier", 64 << 20)])
    with pytest.raises(SnapshotCorrupt, match=digest(data)), cache.open(manifest, source) as lease:
        lease.wait(30)
    # After the repair of the registry, the bytes that were fetched before must not be used.
    opened.damage(weights if not archived else data, 0)
    path = next(opened._root.rglob(f"{digest(data)[7:]}/data"))
    path.write_bytes(data)
    download(manifest, source, tmp_path / "net")
    assert (tmp_path / "net" / "model.safetensors").read_bytes() == weights
    with cache.open(manifest, source) as lease:
        lease.wait(30)
        assert (lease.root / "model.safetensors").read_bytes() == weights


def test_a_damaged_small_layer_and_a_damaged_manifest_are_named(opened: Registry) -> None:
    config = b'{"hidden": 77}'
    found = push_raw(opened, "org/small:v1", {"model.safetensors": WEIGHTS, "config.json": config})
    opened.damage(config, 3)
    source = open_source(f"oci://{opened.host}/org/small:v1")
    with pytest.raises(SnapshotCorrupt, match=digest(config)):
        find_manifest(source)
    path = next(opened._root.rglob(f"{found[7:]}/data"))
    path.write_bytes(path.read_bytes().replace(b"config.json", b"confug.json"))
    with pytest.raises(PilotflameError) as caught:
        open_source(f"oci://{opened.host}/org/small@{found}").stat("config.json")
    assert found in caught.value.message


class _Dying(OciConnection):
    """Kills its process when all connections together have received `left_bytes` bytes."""

    left_bytes = 0

    def read_into(self, view: memoryview) -> int:
        count = super().read_into(view[: max(1, min(len(view), _Dying.left_bytes))])
        _Dying.left_bytes -= count
        if _Dying.left_bytes <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return count


def pull_and_die(url: str, folder: Path, after_bytes: int) -> None:
    """Fork a process that downloads, and that kills itself after `after_bytes` bytes of weights."""
    source = OciSource(url)
    manifest = find_manifest(source)
    child = os.fork()
    if child == 0:
        _Dying.left_bytes = after_bytes
        source.connect = lambda: _Dying(source, source._blobs.connect())  # type: ignore[method-assign]
        try:
            download(manifest, source, folder)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


def check_deaths(opened: Registry, folder: Path, count: int, seed: int) -> None:
    weights = save({"a": torch.rand(10_000_000)})
    data = tar_of({"config.json": b"{}", "model.safetensors": weights})
    opened.push(
        "org/killed:raw", [opened.layer("org/killed", weights, f"{WEIGHT_TYPE}.raw", "model.safetensors")]
    )
    opened.push("org/killed:tar", [opened.layer("org/killed", data, f"{WEIGHT_TYPE}.tar")])
    drawn = random.Random(seed)
    for number in range(count):
        url = f"oci://{opened.host}/org/killed:{'raw' if number % 2 else 'tar'}"
        here, at = folder / f"{number}", drawn.randrange(1, len(weights) - 1000)
        pull_and_die(url, here, at)
        source = open_source(url)
        stats = download(find_manifest(source), source, here)
        assert (here / "model.safetensors").read_bytes() == weights
        # The landed chunks are kept. Each connection loses at most the chunk that it was receiving.
        assert stats.fetched_bytes <= len(weights) - at + 20 * (4 << 20)


def test_a_fetch_that_is_killed_is_continued(opened: Registry, tmp_path: Path) -> None:
    check_deaths(opened, tmp_path, 3, seed=1)


@pytest.mark.slow
def test_a_fetch_that_is_killed_at_any_of_20_bytes_is_continued(opened: Registry, tmp_path: Path) -> None:
    check_deaths(opened, tmp_path, 20, seed=2)


# -- logins


def fault(url: str) -> str:
    with pytest.raises(PilotflameError) as caught:
        find_manifest(open_source(url))
    return caught.value.message


def refused(url: str, secrets: dict[str, str] | None = None) -> PilotflameError:
    with pytest.raises(PilotflameError) as caught:
        find_manifest(open_source(url, secrets))
    text = f"{caught.value.message}{caught.value.remedy}{caught.value.details}"
    assert caught.value.remedy
    assert PASSWORD not in text
    assert base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode() not in text
    return caught.value


@pytest.mark.parametrize("kind", ["closed", "signed"])
def test_the_login_is_the_functions_or_that_of_the_gateway(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: Registry = request.getfixturevalue(kind)
    url = f"oci://{found.host}/org/net:v1"
    assert isinstance(refused(url), SourceDenied)
    own = {"DOCKER_AUTH_CONFIG": auth_file(found.host)}
    assert find_manifest(open_source(url, own)).total_bytes == len(WEIGHTS)
    wrong = refused(url, {"DOCKER_AUTH_CONFIG": auth_file(found.host, password="wrong")})
    assert isinstance(wrong, SourceDenied)
    assert "DOCKER_AUTH_CONFIG" in wrong.message
    # Set docker's file, then podman's file, and below the variable. Each of them takes precedence over the earlier ones.
    for name, value in (("DOCKER_CONFIG", tmp_path), ("REGISTRY_AUTH_FILE", tmp_path / "podman.json")):
        monkeypatch.setenv(name, str(value))
        (value / "config.json" if value.is_dir() else value).write_text(auth_file(found.host))
        assert find_manifest(open_source(url)).total_bytes == len(WEIGHTS)
        # The files are not used for a function that is not trusted, or that has its own secret.
        with pytest.raises(SourceDenied):
            OciSource(url, access=Access(own_only=True)).names()
        assert isinstance(refused(url, {"DOCKER_AUTH_CONFIG": "{}"}), SourceDenied)
    check_download(url, tmp_path / "net")
    monkeypatch.setenv("DOCKER_AUTH_CONFIG", auth_file(found.host, password="wrong"))
    refused(url)


def test_a_token_is_requested_once_and_again_when_it_has_expired(
    signed: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert signed.tokens is not None
    own = {"DOCKER_AUTH_CONFIG": auth_file(signed.host)}
    signed.tokens.asked.clear()
    source = OciSource(f"oci://{signed.host}/org/net:v1", own)
    assert read(source, "model.safetensors", 1000, 5) == WEIGHTS[5:1005]
    ((query, login),) = signed.tokens.asked
    assert query == {"service": ["registry"], "scope": ["repository:org/net:pull"]}
    assert login == f"Basic {base64.b64encode(f'{USER}:{PASSWORD}'.encode()).decode()}"
    monkeypatch.setattr("pilotflame.snapshot.registries.blobs.RENEWED_AFTER_S", 0.0)
    source._blobs._token = signed.tokens.sign("org/other", ["pull"])
    source._blobs.forget()
    assert read(source, "model.safetensors", 1000, 5) == WEIGHTS[5:1005]
    assert len(signed.tokens.asked) == 2


def test_a_public_repository_needs_no_login(signed: Registry) -> None:
    assert signed.tokens is not None
    signed.tokens.public = True
    try:
        assert find_manifest(open_source(f"oci://{signed.host}/org/net:v1")).total_bytes == len(WEIGHTS)
    finally:
        signed.tokens.public = False


@contextmanager
def before(found: Registry) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """Run a registry that redirects requests for blobs to a store. Yield its host, and a list with the server and the login
    of each request.

    The store is another server, and refuses requests with a login, as stores do whose URLs are signed.
    """
    asked: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Print nothing."""

        def do_GET(self) -> None:
            login, role = self.headers.get("Authorization"), self.server.role  # type: ignore[attr-defined]
            asked.append((role, login))
            if role == "front" and "/blobs/" in self.path and login is not None:
                return self._answer(
                    307, {"Location": f"http://127.0.0.2:{store.server_address[1]}{self.path}"}, b""
                )
            if role == "store" and login is not None:
                return self._answer(400, {}, b"")
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            auth = (USER, PASSWORD) if role == "store" else None
            got = httpx.get(f"http://{found.host}{self.path}", headers=headers, auth=auth)
            kept = {n: v for n, v in got.headers.items() if n.lower() not in {"content-length", "date"}}
            return self._answer(got.status_code, kept, got.content)

        def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    front, store = (ThreadingHTTPServer((host, 0), Handler) for host in ("127.0.0.1", "127.0.0.2"))
    for server, role in ((front, "front"), (store, "store")):
        server.role = role  # type: ignore[attr-defined]
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"127.0.0.1:{front.server_address[1]}", asked
    finally:
        for server in (front, store):
            server.shutdown()
            server.server_close()


def test_the_login_does_not_go_to_the_store_to_which_layers_are_redirected(
    closed: Registry, tmp_path: Path
) -> None:
    with before(closed) as (host, asked):
        source = open_source(f"oci://{host}/org/net:v1", {"DOCKER_AUTH_CONFIG": auth_file(host)})
        download(find_manifest(source), source, tmp_path / "net")
        assert (tmp_path / "net" / "model.safetensors").read_bytes() == WEIGHTS
        assert {login for role, login in asked if role == "store"} == {None}
        assert len([role for role, _ in asked if role == "store"]) > 3


def test_the_login_does_not_go_to_a_token_server_without_tls() -> None:
    source = OciSource("oci://registry.example/net:v1", {"DOCKER_AUTH_CONFIG": auth_file("registry.example")})
    source._blobs._challenged('Bearer realm="http://tokens.example/token",service="x"')
    with pytest.raises(SourceDenied, match="without TLS"):
        source._blobs.resolve("x")


def test_addresses_are_checked_at_each_connection(closed: Registry) -> None:
    """The address of the registry is allowed, that of the store to which it redirects is not."""
    nowhere, here = Access(addresses=Addresses.of([])), Access(addresses=Addresses.of(["127.0.0.1/32"]))
    with before(closed) as (host, _):
        url, own = f"oci://{host}/org/net:v1", {"DOCKER_AUTH_CONFIG": auth_file(host)}
        with pytest.raises(SourceDenied, match="may not be connected to"):
            OciSource(url, own, nowhere).names()
        assert OciSource(url, own, here).names() == sorted(FILES)
        with pytest.raises(SourceDenied, match="may not be connected to"):
            read(OciSource(url, own, here), "model.safetensors", 10)


# -- what is refused


LISTS = b"[" + b"[]," * 800_000 + b"[]]"


@contextmanager
def answering(answers: dict[str, bytes]) -> Iterator[str]:
    """Run a server, and yield its host. It answers a path with the text whose key begins the path, or with a challenge if the text
    is empty."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = next(text for path, text in answers.items() if self.path.startswith(path))
            self.send_response(200 if body else 401)
            self.send_header("WWW-Authenticate", f'Bearer realm="http://{self.headers["Host"]}/token"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_manifest_has_at_most_4_mib() -> None:
    with answering({"/v2/": b"{" + b" " * (5 << 20) + b"}"}) as host:
        assert "has more than 4194304 bytes" in fault(f"oci://{host}/org/net:v1")


@pytest.mark.parametrize("text", [b"{}" + b" " * (1 << 20), b"[" * 60_000], ids=["long", "deep"])
def test_the_answer_of_a_token_server_is_bounded(text: bytes) -> None:
    with answering({"/token": text, "/v2/": b""}) as host:
        error = fault(f"oci://{host}/org/net:v1")
        assert "has more than 65536 bytes" in error or "does not answer with a token" in error


def test_values_of_a_servers_answer_are_counted_before_they_are_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with answering({"/": LISTS}) as host:
        monkeypatch.setenv("HF_ENDPOINT", f"http://{host}")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{host}")
        monkeypatch.setattr(http.orjson, "loads", lambda _text: pytest.fail("it was parsed"))
        assert "does not answer as the Hugging Face hub does" in fault("hf://org/net")
        assert "does not answer as an MLflow server does" in fault("mlflow://net@champion")


def test_what_is_not_there_is_named(opened: Registry) -> None:
    push_raw(opened, "org/there:v1")
    for reference in ("org/there:gone", "org/nowhere:v1", f"org/there@sha256:{'0' * 64}"):
        error = refused(f"oci://{opened.host}/{reference}")
        assert isinstance(error, SourceMissing)
        assert reference.partition(":")[0].partition("@")[0] in error.message
    assert isinstance(refused(f"oci://{opened.host}/org/there:v1/folder"), SourceError | PilotflameError)


def test_compressed_weights_are_refused(opened: Registry) -> None:
    layer = opened.layer("org/gz", b"x", f"{WEIGHT_TYPE}.tar+gzip")
    opened.push("org/gz:v1", [layer])
    error = refused(f"oci://{opened.host}/org/gz:v1")
    assert layer["digest"] in error.message
    assert ".raw" in str(error.remedy)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/x", "a//b", "a\\b"])
def test_a_path_that_leads_out_is_refused(opened: Registry, name: str) -> None:
    opened.push("org/out:raw", [opened.layer("org/out", b"x", f"{WEIGHT_TYPE}.raw", name)])
    opened.push("org/out:tar", [opened.layer("org/out", tar_of({name: b"x"}), f"{WEIGHT_TYPE}.tar")])
    for tag in ("raw", "tar"):
        with pytest.raises(SourceError, match="not a name"):
            OciSource(f"oci://{opened.host}/org/out:{tag}").names()


@pytest.mark.parametrize("data", [b"no archive" * 100, tar_of({"a": b"x" * 5000})[:2000]])
def test_what_is_no_archive_is_refused(opened: Registry, data: bytes) -> None:
    opened.push("org/no:tar", [opened.layer("org/no", data, f"{WEIGHT_TYPE}.tar")])
    with pytest.raises(SourceError, match=digest(data)):
        OciSource(f"oci://{opened.host}/org/no:tar").names()


@pytest.mark.parametrize(
    ("registry", "listed", "plain"),
    [
        ("localhost:5000", "", True), ("127.0.0.9", "", True), ("[::1]:5000", "", True), ("ghcr.io", "", False),
        ("registry:5000", "", False), ("registry:5000", "other, registry:5000", True), ("registry", "registry:5000", False),
    ],
)  # fmt: skip
def test_registries_of_this_machine_are_asked_without_tls(registry: str, listed: str, plain: bool) -> None:
    assert is_plain(registry, listed) is plain
