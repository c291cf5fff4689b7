"""What the URLs of each scheme reach: no server may lead a reader to this disk, to another network or to the identity of others.

A new scheme needs an entry in `hostile_of`: how a function names its own server, and all that this server may answer.
"""

from __future__ import annotations

import ast
import base64
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pilotflame.addresses import Addresses
from pilotflame.errors import PilotflameError, SourceDenied, SourceError
from pilotflame.snapshot.sources import azure, google, retries
from pilotflame.snapshot.sources.access import ANY, Access
from pilotflame.snapshot.sources.locate import follow, open_source
from pilotflame.snapshot.sources.schemes import SCHEMES, Connections, Leads
from pilotflame.snapshot.sources.source import Listing, Pinnable
from source_tests import read

pytestmark = pytest.mark.usefixtures("bare_environment")

ROOT = Path(__file__).parents[3]
SECRET = b"bytes that only the gateway's user may read"
THEIRS, OWN = "gateway-hush", "function-own"
DIGEST = f"sha256:{'0' * 64}"


@pytest.fixture(autouse=True)
def _nothing_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "ATTEMPTS", 1)
    for module in (google, azure):
        monkeypatch.setattr(module, "RETRIES", {"max_retries": 0, "retry_timeout": timedelta(seconds=1)})


@dataclass(frozen=True)
class Hostile:
    """A server that a function has named for a scheme: the function's URL and secrets, and the answers of the server."""

    url: str
    secrets: Mapping[str, str]
    theirs: Mapping[str, str]
    """The variables of the gateway's own identity."""
    answer: Callable[[str], object] = lambda target: {"url": target}
    """Returns the answer with which the server leads a reader to `target`."""


def hostile_of(name: str, server: str) -> Hostile:
    """Return how a function names this server for a scheme. A scheme without an entry is a KeyError."""
    host = server.removeprefix("http://")
    keys = {"AWS_ACCESS_KEY_ID": "AKIA{}", "AWS_SECRET_ACCESS_KEY": "{}"}
    layers = lambda target: {  # noqa: E731
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "application/json", "digest": DIGEST, "size": 2, "urls": [target]},
        "layers": [{
            "mediaType": "application/vnd.cncf.model.weight.v1.raw", "digest": DIGEST, "size": len(SECRET), "urls": [target],
            "annotations": {"org.cncf.model.filepath": "secret"},
        }],
    }  # fmt: skip
    return {
        "s3": Hostile("s3://bucket/net", {"AWS_ENDPOINT_URL_S3": server, "AWS_DEFAULT_REGION": "us-east-1"} | filled(keys, OWN), filled(keys, THEIRS)),
        "gs": Hostile("gs://bucket/net", {"GOOGLE_BASE_URL": server, "GOOGLE_BEARER_TOKEN": OWN}, {"GOOGLE_BEARER_TOKEN": THEIRS}),
        "az": Hostile(
            "az://container/net", {"AZURE_STORAGE_ACCOUNT_NAME": "one", "AZURE_STORAGE_ENDPOINT": server, "AZURE_STORAGE_TOKEN": OWN},
            {"AZURE_STORAGE_ACCOUNT_NAME": "theirs", "AZURE_STORAGE_TOKEN": THEIRS},
        ),
        "hf": Hostile("hf://org/net", {"HF_ENDPOINT": server, "HF_TOKEN": OWN}, {"HF_TOKEN": THEIRS}, lambda target: {"sha": "0" * 40, "siblings": [{"rfilename": target}, {"rfilename": "secret"}]}),
        "oci": Hostile(f"oci://{host}/net:1", {"PILOTFLAME_OCI_PLAIN_HTTP": host}, {}, layers),
        "mlflow": Hostile("mlflow://net/1", {"MLFLOW_TRACKING_URI": server, "MLFLOW_TRACKING_TOKEN": OWN}, {"MLFLOW_TRACKING_TOKEN": THEIRS}, lambda target: {"artifact_uri": target}),
        "http": Hostile(f"{server}/net", {"PILOTFLAME_SNAPSHOT_TOKEN": OWN}, {"PILOTFLAME_SNAPSHOT_TOKEN": THEIRS}),
        "https": Hostile(f"https://{host}/net", {"PILOTFLAME_SNAPSHOT_TOKEN": OWN}, {"PILOTFLAME_SNAPSHOT_TOKEN": THEIRS}),
    }[name]  # fmt: skip


def filled(variables: Mapping[str, str], word: str) -> dict[str, str]:
    return {name: text.format(word) for name, text in variables.items()}


class Server(ThreadingHTTPServer):
    """Answers every request in the same way, and keeps the heads of the requests."""

    def __init__(self, host: str) -> None:
        super().__init__((host, 0), Handler)
        self.seen: list[str] = []
        self.body, self.to = b"", ""
        self.url = f"http://{host}:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.seen.append(f"{self.path}\n{self.headers}")
        self.send_response(307 if self.server.to else 200)
        if self.server.to:
            self.send_header("Location", self.server.to)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def serving(host: str = "127.0.0.1") -> Iterator[Server]:
    with Server(host) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def read_all_of(url: str, secrets: Mapping[str, str], access: Access) -> bytes:
    """Do all that a reader of a source does, and return the bytes that come."""
    found = b""
    with suppress(PilotflameError):
        source = open_source(url, secrets, access)
        for ask in (
            source.pinned if isinstance(source, Pinnable) else None,
            source.names if isinstance(source, Listing) else None,
        ):
            with suppress(PilotflameError):
                found += repr(ask()).encode() if ask is not None else b""
        for name in ("secret", "model.safetensors"):
            with suppress(PilotflameError):
                found += read(source, name, 0, source.stat(name).size_bytes)
    return found


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("redirects", [True, False], ids=["redirect", "answer"])
def test_no_server_leads_to_the_disk_or_to_another_network(
    name: str, redirects: bool, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    with serving() as server, serving("127.0.0.2") as private:
        hostile = hostile_of(name, server.url)
        private.body = SECRET
        here = Access(own_only=True, addresses=Addresses.of(["127.0.0.1"]))
        for target in (str(tmp_path), f"{tmp_path.as_uri()}/secret", f"{private.url}/secret"):
            server.to = target if redirects else ""
            server.body = b"" if redirects else json.dumps(hostile.answer(target)).encode()
            for access in (here, ANY) if "file" in target or target.startswith("/") else (here,):
                assert SECRET not in read_all_of(hostile.url, hostile.secrets, access), target
        assert private.seen == []


@pytest.mark.parametrize("name", SCHEMES)
def test_no_server_gets_an_identity_that_is_not_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function has named the server, so no server may get the gateway's identity. Only the named server may get the function's."""
    with serving() as server, serving("127.0.0.2") as other:
        hostile = hostile_of(name, server.url)
        for one in SCHEMES:
            for variable, value in hostile_of(one, other.url).theirs.items():
                monkeypatch.setenv(variable, value)
        for variable in ("AWS_ENDPOINT_URL_S3", "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT", "HF_ENDPOINT"):
            monkeypatch.setenv(variable, other.url)
        places = [
            f"{other.url}/net",
            *(f"{one}://bucket/net" for one in SCHEMES if one not in ("http", "https", "mlflow")),
        ]
        for target in places:
            for redirects in (True, False) if target is places[0] else (False,):
                server.to = target if redirects else ""
                server.body = b"" if redirects else json.dumps(hostile.answer(target)).encode()
                read_all_of(hostile.url, hostile.secrets, ANY)
        assert [head for head in (*server.seen, *other.seen) if THEIRS in plain(head)] == []
        assert [head for head in other.seen if OWN in plain(head)] == []


@pytest.mark.parametrize("name", SCHEMES)
def test_a_server_that_a_url_names_gets_no_identity_of_the_gateway(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function has no secrets, so a source may use the gateway's identity, but only for servers that the gateway's settings name."""
    with serving() as server, serving("127.0.0.2") as other:
        for one in SCHEMES:
            for variable, value in hostile_of(one, other.url).theirs.items():
                monkeypatch.setenv(variable, value)
        for variable in (
            "AWS_ENDPOINT_URL_S3",
            "GOOGLE_BASE_URL",
            "AZURE_STORAGE_ENDPOINT",
            "HF_ENDPOINT",
            "MLFLOW_TRACKING_URI",
        ):
            monkeypatch.setenv(variable, other.url)
        monkeypatch.setenv("PILOTFLAME_OCI_PLAIN_HTTP", server.url.removeprefix("http://"))
        read_all_of(hostile_of(name, server.url).url, {}, ANY)
        assert [head for head in server.seen if THEIRS in plain(head)] == []
        # Check that the server was reached, if a URL of the scheme names a server and needs no TLS.
        assert server.seen or name not in ("http", "oci")


def plain(head: str) -> str:
    """Return the head of a request with the logins in it decoded."""
    logins = re.findall(r"Basic ([\w+/=]+)", head)
    return head + " ".join(base64.b64decode(one).decode("utf-8", "replace") for one in logins)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_server_leads_only_where_its_row_says(name: str, tmp_path: Path) -> None:
    scheme, url = SCHEMES[name], f"{name}://place/folder"
    disk = Access(addresses=Addresses())
    if scheme.leads is Leads.STORES_AND_DISK:
        assert follow(url, str(tmp_path), {}, ANY).url == str(tmp_path)
        for secrets, access in (
            ({f"{scheme.identity.families[0]}X": "own"}, ANY),
            ({}, disk),
            ({}, Access(own_only=True)),
        ):
            with pytest.raises(SourceDenied):
                follow(url, str(tmp_path), secrets, access)
    else:
        with pytest.raises(SourceError):
            follow(url, str(tmp_path), {}, ANY)
    if scheme.leads is Leads.NOWHERE:
        with pytest.raises(SourceError):
            follow(url, "https://elsewhere.example/net", {}, ANY)
    if scheme.connections is Connections.OF_A_CLIENT:
        with pytest.raises(SourceDenied):
            open_source(url, {f"{scheme.identity.families[0]}X": "own"}, disk)


# For each name, the only modules that may use it. So no source opens a disk or a connection, or finds an identity, in its own way.
ALONE = {
    "FolderSource": {"locate.py", "folder.py"},
    "open_source": {"locate.py"},
    "environ": {"variables.py", "proxy.py", "login.py", "s3_client.py"},
    "create_connection": set[str](),
    "urlopen": set[str](),
}


@pytest.mark.parametrize("name", ALONE)
def test_sources_have_no_way_of_their_own(name: str) -> None:
    found = set()
    for path in (*(ROOT / "snapshot/sources").glob("*.py"), *(ROOT / "snapshot/registries").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if name in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", "")):
                found.add(path.name)
    assert found <= ALONE[name]
