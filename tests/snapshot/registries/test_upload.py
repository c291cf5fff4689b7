"""Pushing to Debian's docker-registry: the artifact, layers that exist already, connections that break, logins, refusals."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit
from zlib import crc32

import httpx
import pytest
import torch
from pilotflame.errors import PilotflameError, SnapshotChanged, SnapshotError, SourceDenied, SourceError
from pilotflame.snapshot.caching.cache import Cache
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.converting.push import Pushed, push
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.discover import find_manifest, find_signature
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, SIGNATURE_NAME, Manifest
from pilotflame.snapshot.registries import upload
from pilotflame.snapshot.registries.oci import OciSource
from pilotflame.snapshot.registries.upload import BlobFile, BlobUpload
from pilotflame.snapshot.sources import retries
from pilotflame.snapshot.sources.realm import realm_of
from registry_server import (
    FILEPATH,
    MANIFEST_TYPE,
    MODEL_TYPE,
    PASSWORD,
    TITLE,
    Registry,
    auth_file,
    registry,
)
from safetensors.torch import save_file

CHUNK_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def _small_and_bare(bare_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the logins of this machine, and set small chunks and short waits before a retry."""
    monkeypatch.setattr(upload, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(retries, "FIRST_DELAY_S", 0.001)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry(tmp_path_factory.mktemp("open")) as found:
        yield found


@pytest.fixture(scope="module", params=["basic", "token"])
def closed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry(tmp_path_factory.mktemp(request.param), request.param) as found:
        yield found


def weights(folder: Path, seed: int = 0) -> tuple[Path, Manifest]:
    """Make a snapshot of 5 MB in two shards, with two assets."""
    (folder / "tokenizer").mkdir(parents=True)
    made = torch.Generator().manual_seed(seed)
    save_file({"a": torch.rand(1_000_000, generator=made)}, folder / "a.safetensors")
    save_file({"b": torch.rand(250_000, generator=made)}, folder / "b.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in "ab"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer" / "vocab.txt").write_text("one")
    return folder, create(folder)


def is_fetched(url: str, folder: Path, cache: Path, secrets: dict[str, str] | None = None) -> bool:
    """Fetch as a function does. Return True if the files are equal to the files in `folder`."""
    source = OciSource(url, secrets)
    manifest = find_manifest(source).with_realm(realm_of(url, secrets))
    with Cache([Tier(cache, 64 << 20)]).open(manifest, source) as lease:
        lease.wait(30)
        shards = {shard.name: (lease.root / shard.name).read_bytes() for shard in manifest.shards}
    assets = {asset.name: bytearray(asset.size_bytes) for asset in manifest.assets}
    for name, data in assets.items():
        source.read_into(name, 0, memoryview(data))
    return all((folder / name).read_bytes() == data for name, data in {**shards, **assets}.items())


def test_a_pushed_snapshot_is_a_model_artifact_that_functions_fetch(opened: Registry, tmp_path: Path) -> None:
    folder, manifest = weights(tmp_path / "here")
    url = f"oci://{opened.host}/org/whole:v1"
    seen: list[tuple[int, int]] = []
    destination = OciSource(url)
    pushed = push(folder, manifest, destination, progress=lambda done, total: seen.append((done, total)))
    total_bytes = manifest.total_bytes + manifest.assets_bytes
    assert pushed == Pushed(4, total_bytes, 0, 0)
    assert seen == sorted(seen)
    assert seen[-1] == (total_bytes, total_bytes)
    assert find_manifest(OciSource(url)) == manifest
    assert is_fetched(url, folder, tmp_path / "cache")
    text = httpx.get(f"http://{opened.host}/v2/org/whole/manifests/v1", headers={"Accept": MANIFEST_TYPE})
    artifact = text.json()
    assert destination.pinned() == f"{url}@{text.headers['docker-content-digest']}"
    assert (artifact["mediaType"], artifact["artifactType"]) == (MANIFEST_TYPE, MODEL_TYPE)
    kinds = {layer["annotations"][FILEPATH]: layer["mediaType"] for layer in artifact["layers"]}
    assert kinds["a.safetensors"] == "application/vnd.cncf.model.weight.v1.raw"
    assert kinds["tokenizer/vocab.txt"] == "application/vnd.cncf.model.weight.config.v1.raw"
    assert list(kinds)[-1] == MANIFEST_NAME
    assert all(layer["annotations"][TITLE] in kinds for layer in artifact["layers"])
    config = httpx.get(f"http://{opened.host}/v2/org/whole/blobs/{artifact['config']['digest']}").json()
    assert config["modelfs"] == {
        "type": "layers",
        "diffIds": [layer["digest"] for layer in artifact["layers"]],
    }


def test_a_signature_is_sent_with_the_artifact(opened: Registry, tmp_path: Path) -> None:
    folder, _ = weights(tmp_path / "here")
    manifest = create(folder, algorithm="sha256")
    (folder / SIGNATURE_NAME).write_bytes(b"a signature")
    url = f"oci://{opened.host}/org/signed:v1"
    push(folder, manifest, OciSource(url))
    assert find_signature(OciSource(url), find_manifest(OciSource(url))) == b"a signature"
    assert is_fetched(url, folder, tmp_path / "cache")


def test_a_push_without_a_signature_keeps_that_of_the_same_snapshot(opened: Registry, tmp_path: Path) -> None:
    folder, _ = weights(tmp_path / "here")
    manifest = create(folder, algorithm="sha256")
    (signature := folder / SIGNATURE_NAME).write_bytes(b"a signature")
    url = f"oci://{opened.host}/org/kept:v1"
    push(folder, manifest, first := OciSource(url))
    signature.unlink()
    push(folder, manifest, again := OciSource(url))
    assert again.pinned() == first.pinned()
    signature.write_bytes(b"another one")
    with pytest.raises(SnapshotError, match=rf"with other files \({SIGNATURE_NAME}\)"):
        push(folder, manifest, OciSource(url))
    signature.unlink()
    push(folder, manifest, OciSource(url), force=True)
    assert find_signature(OciSource(url), manifest) is None


def test_other_files_beside_the_same_snapshot_are_replaced_by_force_only(
    opened: Registry, tmp_path: Path
) -> None:
    folder, manifest = weights(tmp_path / "here")
    url = f"oci://{opened.host}/org/beside:v1"
    push(folder, manifest, OciSource(url))
    layers = httpx.get(f"http://{opened.host}/v2/org/beside/manifests/v1", headers={"Accept": MANIFEST_TYPE})
    notes = opened.layer("org/beside", b"notes", "text/plain", "NOTES")
    opened.push("org/beside:v1", [*layers.json()["layers"], notes])
    with pytest.raises(SnapshotError, match=r"holds this snapshot with other files \(NOTES\)"):
        push(folder, manifest, OciSource(url))
    push(folder, manifest, OciSource(url), force=True)
    assert "NOTES" not in OciSource(url).names()


def test_what_the_registry_has_is_not_sent_again(opened: Registry, tmp_path: Path) -> None:
    folder, manifest = weights(tmp_path / "here")
    url = f"oci://{opened.host}/org/again:v1"
    push(folder, manifest, first := OciSource(url))
    pushed = push(folder, manifest, again := OciSource(url))
    assert (pushed.sent_bytes, pushed.kept_files) == (0, 4)
    assert again.pinned() == first.pinned()
    save_file({"b": torch.zeros(250_000)}, folder / "b.safetensors")
    pushed = push(folder, create(folder), OciSource(f"oci://{opened.host}/org/again:v2"))
    assert (pushed.sent_files, pushed.kept_files) == (1, 3)
    assert 1_000_000 <= pushed.sent_bytes <= 1_001_000


def test_a_tag_moves_by_force_only_and_pinned_functions_keep_their_weights(
    opened: Registry, tmp_path: Path
) -> None:
    folder, manifest = weights(tmp_path / "here")
    other, changed = weights(tmp_path / "other", seed=1)
    url = f"oci://{opened.host}/org/moved:v1"
    push(folder, manifest, before := OciSource(url))
    pinned = before.pinned()
    with pytest.raises(SnapshotError, match=f"holds another snapshot, {manifest.digest[:12]}"):
        push(other, changed, OciSource(url))
    push(other, changed, OciSource(url), force=True)
    assert is_fetched(url, other, tmp_path / "cache")
    assert is_fetched(pinned, folder, tmp_path / "cache")
    opened.push("org/moved:image", [opened.layer("org/moved", b"x", "application/vnd.x.layer.v1.tar+gzip")])
    with pytest.raises(SnapshotError, match="holds something else"):
        push(folder, manifest, OciSource(f"oci://{opened.host}/org/moved:image"))


# -- connections that break


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Print nothing when a client closes its connection."""


class Front:
    """A server in front of a registry, which spoils requests. `faults` maps a method to what happens to its next requests:

    "busy"  the response is 503
    "half"  the registry gets half of the body, and the client no response
    "lost"  the registry gets the request, and the client no response
    "gone"  the response is 404
    "mute"  the response is 202 without Location
    "moved" the response redirects to a path where nothing is
    """

    def __init__(self, found: Registry, faults: dict[str, list[str]]) -> None:
        self.registry, self.faults = found, faults
        self.uploads_at = ""
        """The origin of the URLs of uploads; "" for that of the request."""
        self.other_login = ""
        """The login that replaces the client's login in requests to the host `other`."""
        self.sent_bytes = 0
        self.logins: list[tuple[str, str | None]] = []
        """The host and the login of each request."""
        handler = type("Handler", (_FrontHandler,), {"front": self})
        self._servers = [_QuietServer((host, 0), handler) for host in ("127.0.0.1", "127.0.0.2")]
        self.host, self.other = (f"{one.server_address[0]}:{one.server_address[1]}" for one in self._servers)
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()


class _FrontHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    front: Front

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_any(self) -> None:
        front, host = self.front, self.headers["Host"]
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if self.command in {"PATCH", "PUT"} and "/blobs/" in self.path:
            front.sent_bytes += len(body)
        front.logins.append((host, self.headers["Authorization"]))
        if host == front.other:
            self.headers["Authorization"] = front.other_login
        fault = (front.faults.get(self.command) or [""]).pop(0)
        if fault in {"busy", "gone", "mute", "moved"}:
            status = {"busy": 503, "gone": 404, "mute": 202, "moved": 307}[fault]
            return self._answer(status, [("Location", "/nothing")] if fault == "moved" else [], b"")
        answer = self._passed_on(body[: len(body) // 2] if fault == "half" else body, whole=fault != "half")
        if fault or answer is None:
            self.close_connection = True
            return None
        return self._answer(*answer)

    def _passed_on(self, body: bytes, *, whole: bool) -> tuple[int, list[tuple[str, str]], bytes] | None:
        connection = http.client.HTTPConnection(self.front.registry.host, timeout=30)
        try:
            connection.putrequest(self.command, self.path, skip_accept_encoding=True, skip_host=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            if not whole:
                return None
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() == "location":
                path = urlsplit(value)._replace(scheme="", netloc="").geturl()
                self.send_header(name, f"{self.front.uploads_at}{path}")
            elif name.lower() not in {"content-length", "date", "server", "transfer-encoding"}:
                self.send_header(name, value)
        size = dict(headers).get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", size)
        self.end_headers()
        self.wfile.write(body)


for method in ("GET", "HEAD", "POST", "PATCH", "PUT"):
    setattr(_FrontHandler, f"do_{method}", _FrontHandler.do_any)


@contextmanager
def before(found: Registry, **faults: list[str]) -> Iterator[Front]:
    front = Front(found, faults)
    try:
        yield front
    finally:
        front.close()


@pytest.mark.parametrize(
    ("faults", "most_bytes"),
    [
        ({"POST": ["busy"], "HEAD": ["busy"], "GET": ["busy"]}, 0),
        ({"PATCH": ["", "", "busy"]}, CHUNK_BYTES),
        ({"PATCH": ["busy", "lost"]}, 2 * CHUNK_BYTES),
        ({"PATCH": ["", "half"]}, 3 * CHUNK_BYTES),
        ({"PATCH": ["", "gone"]}, 3 * CHUNK_BYTES),
        ({"PUT": ["lost", "busy", "lost"]}, 4 * CHUNK_BYTES),
        ({"PUT": ["half"]}, 4 * CHUNK_BYTES),
    ],
)
def test_a_push_goes_on_after_failures(
    opened: Registry, tmp_path: Path, faults: dict[str, list[str]], most_bytes: int
) -> None:
    # Use other weights for each case, because the registry keeps the layers of earlier cases.
    seed = crc32(repr(faults).encode())
    folder, manifest = weights(tmp_path / "here", seed)
    with before(opened, **faults) as front:
        url = f"oci://{front.host}/org/broken:v{seed}"
        push(folder, manifest, OciSource(url))
        total_bytes = manifest.total_bytes + manifest.assets_bytes + 10_000
        assert front.sent_bytes <= total_bytes + most_bytes
        assert not any(front.faults.values())
        assert is_fetched(url, folder, tmp_path / "cache")


def test_a_registry_that_stays_busy_is_an_error(opened: Registry, tmp_path: Path) -> None:
    folder, manifest = weights(tmp_path / "here")
    with before(opened, PUT=["busy"] * 100) as front:
        url = f"oci://{front.host}/org/busy:v1"
        with pytest.raises(SourceError, match="503"):
            push(folder, manifest, OciSource(url), force=True)
        assert len(front.faults["PUT"]) > 90


def test_a_registry_that_names_no_upload_is_an_error(opened: Registry, tmp_path: Path) -> None:
    folder, manifest = weights(tmp_path / "here", seed=2)
    with before(opened, POST=["mute"] * 100) as front:
        with pytest.raises(SourceError, match=rf"oci://{front.host}/org/mute .* without Location"):
            push(folder, manifest, OciSource(f"oci://{front.host}/org/mute:v1"))
        assert len(front.faults["POST"]) == 99


def test_a_redirect_does_not_prove_that_a_blob_is_there(opened: Registry, tmp_path: Path) -> None:
    """If the registry redirects HEAD, the push reads the first byte of the blob to find out whether the blob is there."""
    folder, manifest = weights(tmp_path / "here", seed=3)
    with before(opened, HEAD=["moved"] * 6) as front:
        url = f"oci://{front.host}/org/redirected:v1"
        assert push(folder, manifest, OciSource(url)).sent_files == 4
        assert is_fetched(url, folder, tmp_path / "cache")
        front.faults["HEAD"] = ["moved"] * 6
        assert push(folder, manifest, OciSource(url)).sent_files == 0
        assert not front.faults["HEAD"]


def test_a_file_that_changes_while_it_is_sent_is_an_error(opened: Registry, tmp_path: Path) -> None:
    (path := tmp_path / "a.safetensors").write_bytes(b"a" * 3 * CHUNK_BYTES)
    source = OciSource(f"oci://{opened.host}/org/changing:v1")
    file = BlobFile.of("a.safetensors", path)
    for content, said in ((b"b" * 3 * CHUNK_BYTES, "changed while"), (b"b" * CHUNK_BYTES, "became shorter")):
        path.write_bytes(content)
        with pytest.raises(SnapshotChanged, match=said):
            BlobUpload(source._blobs, file, None).run()
    path.unlink()
    with pytest.raises(SnapshotChanged, match="cannot be read any more: No such file"):
        BlobFile.of("a.safetensors", path)


# -- logins


def test_a_push_needs_the_right_to_push(closed: Registry, tmp_path: Path) -> None:
    folder, manifest = weights(tmp_path / "here")
    url, own = f"oci://{closed.host}/org/mine:v1", {"DOCKER_AUTH_CONFIG": auth_file(closed.host)}
    for secrets in ({}, {"DOCKER_AUTH_CONFIG": auth_file(closed.host, password="wrong")}):
        refused(folder, manifest, url, secrets)
    push(folder, manifest, OciSource(url, own))
    assert is_fetched(url, folder, tmp_path / "cache", own)
    if closed.tokens is not None:
        assert closed.tokens.asked[-1][0]["scope"] == ["repository:org/mine:pull"], "a fetch asks for less"
        assert ["repository:org/mine:pull,push"] in [query["scope"] for query, _ in closed.tokens.asked]
        closed.tokens.gives.remove("push")
        try:
            assert "may not be written to" in refused(folder, manifest, url, own).message
        finally:
            closed.tokens.gives.add("push")


def refused(folder: Path, manifest: Manifest, url: str, secrets: dict[str, str]) -> PilotflameError:
    other = f"{url}-other"
    with pytest.raises(SourceDenied) as caught:
        push(folder, manifest, OciSource(other, secrets))
    assert PASSWORD not in f"{caught.value.message}{caught.value.remedy}{caught.value.details}"
    return caught.value


def test_the_login_does_not_go_to_another_server_that_takes_uploads(closed: Registry, tmp_path: Path) -> None:
    """The other server needs no login from the client, like a store whose URLs are signed."""
    folder, manifest = weights(tmp_path / "here")
    with before(closed) as front:
        front.uploads_at = f"http://{front.other}"
        basic = f"Basic {json.loads(auth_file('r'))['auths']['r']['auth']}"
        front.other_login = closed._sign("org/signed").get("Authorization", basic)
        url = f"oci://{front.host}/org/signed:v1"
        push(folder, manifest, OciSource(url, {"DOCKER_AUTH_CONFIG": auth_file(front.host)}))
        assert {login for host, login in front.logins if host == front.other} == {None}
        assert front.sent_bytes > manifest.total_bytes


# -- what is refused


def test_a_refusal_before_the_end_of_a_file_is_named(tmp_path: Path) -> None:
    """The server answers when it has the head of the request, and closes the connection."""
    (path := tmp_path / "a.safetensors").write_bytes(b"a" * 12 * CHUNK_BYTES)
    file = BlobFile.of("a.safetensors", path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = OciSource(f"oci://127.0.0.1:{server.getsockname()[1]}/org/net:v1")
        upload = BlobUpload(source._blobs, file, None)
        upload._url = source._blobs.url_of("blobs/uploads/1")

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1)
                connection.sendall(
                    b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )
                connection.shutdown(socket.SHUT_RDWR)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(SourceError, match=r"does not take a\.safetensors \(HTTP 413\)"):
            upload._advanced()
        thread.join()


@pytest.mark.parametrize("end", ["v1@sha256:" + "0" * 64, "v1/folder"])
def test_an_artifact_is_pushed_as_a_whole_to_a_tag(opened: Registry, tmp_path: Path, end: str) -> None:
    folder, manifest = weights(tmp_path / "here")
    with pytest.raises(SourceError, match="pushed as a whole"):
        push(folder, manifest, OciSource(f"oci://{opened.host}/org/part:{end}"))


def test_more_files_than_a_reader_takes_are_refused_before_any_is_sent(
    opened: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, manifest = weights(tmp_path / "here", seed=4)
    monkeypatch.setattr(upload, "MAX_LAYERS", 4)
    with before(opened) as front:
        with pytest.raises(SourceError, match=r"5 files, .* at most 4"):
            push(folder, manifest, OciSource(f"oci://{front.host}/org/many:v1"), force=True)
        assert not front.logins
