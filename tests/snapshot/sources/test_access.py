"""Sources for functions that are not trusted: only their own secrets, and only allowed addresses, also after redirects."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto_server import moto_server
from pilotflame.addresses import Addresses
from pilotflame.errors import SourceDenied
from pilotflame.snapshot.sources.access import ANY, Access
from pilotflame.snapshot.sources.locate import KeptSources, open_source
from pilotflame.snapshot.sources.realm import realm_of
from source_tests import read

pytestmark = pytest.mark.usefixtures("bare_environment")

HERE = "127.0.0.1/32"
OWN = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLEEXAMPLE00", "AWS_SECRET_ACCESS_KEY": "own"}
THEIRS = {"AWS_ACCESS_KEY_ID": "AKIAGATEWAYGATEWAY00", "AWS_SECRET_ACCESS_KEY": "hush"}


def access(*networks: str, own_only: bool = True) -> Access:
    return Access(own_only=own_only, addresses=Addresses.of(networks))


class Recorder(BaseHTTPRequestHandler):
    """Redirects to the URL in the query `to`. Without it, sends a body. The server keeps the headers of each request."""

    server: Recording

    def do_GET(self) -> None:
        self.server.requests.append((self.path, dict(self.headers)))
        target = self.path.partition("?to=")[2]
        self.send_response(302 if target else 200)
        if target:
            self.send_header("Location", target)
        self.send_header("Content-Length", "0" if target else "4")
        self.end_headers()
        if not target:
            self.wfile.write(b"body")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Recording(ThreadingHTTPServer):
    def __init__(self, host: str) -> None:
        super().__init__((host, 0), Recorder)
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.url = f"http://{host}:{self.server_port}"


@contextmanager
def recording(host: str = "127.0.0.1") -> Iterator[Recording]:
    with Recording(host) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """The endpoint of moto's server, which has the object `f` in the bucket `weights`."""
    with moto_server() as endpoint:
        store = boto3.client(
            "s3", endpoint_url=endpoint, region_name="us-east-1",
            aws_access_key_id="AKIAEXAMPLEEXAMPLE00", aws_secret_access_key="any",
        )  # fmt: skip
        store.create_bucket(Bucket="weights")
        store.put_object(Bucket="weights", Key="f", Body=b"body")
        store.close()
        yield endpoint


def test_our_own_network_is_not_connected_to() -> None:
    with recording() as server:
        for url in (
            server.url,
            f"http://localhost:{server.server_port}",
            f"http://0x7f.1:{server.server_port}",
        ):
            with pytest.raises(SourceDenied, match="loopback") as caught:
                open_source(url, {}, access()).stat("f")
            assert "PILOTFLAME_SNAPSHOT_NETWORKS" in caught.value.remedy
        assert server.requests == []
    for url in ("http://169.254.169.254/latest", "https://10.1.2.3/net", "http://[::ffff:192.168.0.1]/net"):
        with pytest.raises(SourceDenied, match="its address may not be connected to"):
            open_source(url, {}, access()).stat("f")


def test_a_redirect_leads_only_to_allowed_addresses() -> None:
    with recording() as public, recording("127.0.0.2") as private:
        source = open_source(f"{public.url}/?to={private.url}/secret", {}, access(HERE))
        with pytest.raises(SourceDenied, match="loopback"):
            source.stat("f")
        assert private.requests == []
        there = open_source(f"{public.url}/?to={public.url}/there", {}, access(HERE))
        assert there.stat("f").size_bytes == 4


def test_an_allowed_network_is_connected_to_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def resolve_ours(host: str, *rest: Any, **more: Any) -> Any:
        return resolve("127.0.0.2" if host == "weights.example" else host, *rest, **more)

    # This proxy must not be used, because the addresses to which a proxy connects cannot be checked.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(socket, "getaddrinfo", resolve_ours)
    with recording("127.0.0.2") as server:
        url = f"http://weights.example:{server.server_port}/net"
        assert read(open_source(url, {}, access("127.0.0.2")), "f", 4) == b"body"
        with pytest.raises(SourceDenied, match="loopback"):
            open_source(url, {}, access(HERE)).stat("f")
        # A source of the same URL that was kept for another rule is not used.
        kept = KeptSources()
        assert kept.open(f"{server.url}/net", {}, access("127.0.0.2")).stat("f").size_bytes == 4
        with pytest.raises(SourceDenied):
            kept.open(f"{server.url}/net", {}, access()).stat("f")


def test_s3_without_secrets_is_read_anonymously_and_at_no_endpoint_of_the_gateway(
    moto: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {**THEIRS, "AWS_ENDPOINT_URL_S3": moto, "AWS_DEFAULT_REGION": "eu-west-1"}.items():
        monkeypatch.setenv(name, value)
    trusted: Any = open_source("s3://weights", {})
    assert "AKIAGATEWAYGATEWAY00" in trusted.resolve("f").url
    source: Any = open_source("s3://weights", {}, access(HERE))
    assert source.resolve("f").url == "https://weights.s3.amazonaws.com/f"
    for name in THEIRS:
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = k\naws_secret_access_key = hush\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    source = open_source("s3://weights", {}, access(HERE))
    assert source.resolve("f").url == "https://weights.s3.amazonaws.com/f"


def test_s3_reads_and_lists_only_at_allowed_addresses(moto: str) -> None:
    own = {**OWN, "AWS_ENDPOINT_URL": moto}
    source: Any = open_source("s3://weights", own, access(HERE))
    assert source.names() == ["f"]
    assert read(source, "f", 4) == b"body"
    for endpoint in (moto, "https://127.0.0.1:1", "http://[::1]:1", "https://localhost:1"):
        source = open_source("s3://weights", {**OWN, "AWS_ENDPOINT_URL": endpoint}, access())
        for call in (source.names, lambda: source.stat("f")):  # noqa: B023  called in this iteration
            with pytest.raises(SourceDenied, match="loopback"):
                call()


def test_the_hub_gets_no_token_of_the_gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    login = tmp_path / ".cache" / "huggingface"
    login.mkdir(parents=True)
    (login / "token").write_text("hush")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HF_HOME")
    with recording() as server:
        for name, value in {"HF_TOKEN": "hush", "HF_ENDPOINT": server.url}.items():
            monkeypatch.setenv(name, value)
        url = f"hf://org/net@{'a' * 40}"
        trusted: Any = open_source(url, {})
        assert trusted.resolve("f").headers == {"Authorization": "Bearer hush"}
        source: Any = open_source(url, {}, access(HERE))
        assert (source.resolve("f").headers, source.resolve("f").url[:23]) == ({}, "https://huggingface.co/")
        assert read(open_source(url, {"HF_ENDPOINT": server.url}, access(HERE)), "f", 4) == b"body"
        assert not [headers for _, headers in server.requests if "Authorization" in headers]


def test_the_gateways_identity_is_used_where_its_owner_says_so(
    moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**THEIRS, "AWS_ENDPOINT_URL_S3": moto, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    source: Any = open_source("s3://weights", {}, access(HERE, own_only=False))
    assert "AKIAGATEWAYGATEWAY00" in source.resolve("f").url
    assert source.names() == ["f"]


@pytest.mark.parametrize(
    ("url", "own"),
    [("gs://weights/net", {"GOOGLE_BASE_URL": "http://10.0.0.1"}), ("az://weights/net", {"AZURE_STORAGE_ACCOUNT_NAME": "a"})],
)  # fmt: skip
def test_clouds_whose_clients_cannot_be_checked_are_refused(
    url: str, own: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "gateway")
    for secrets, rule in (({}, access()), (own, access()), (own, access(own_only=False))):
        with pytest.raises(SourceDenied, match="cannot be checked") as caught:
            open_source(url, secrets, rule)
        assert "PILOTFLAME_SNAPSHOT_IDENTITY" in caught.value.remedy
    assert open_source(url, {}, access(own_only=False)).url == url


def test_a_function_without_the_gateways_identity_shares_no_weights_with_those_that_have_it() -> None:
    url = "s3://weights/net"
    assert realm_of(url, {}, access()) == realm_of(url, {}, access("10.0.0.0/8"))
    assert realm_of(url, {}, access()) != realm_of(url, {})
    assert realm_of(url, {}, access(own_only=False)) == realm_of(url, {})


def test_the_rule_reaches_another_process_unchanged() -> None:
    for rule in (ANY, access(), access("10.0.0.0/8", "fd00::/8"), access(own_only=False)):
        assert Access.from_wire(rule.to_wire()) == rule
