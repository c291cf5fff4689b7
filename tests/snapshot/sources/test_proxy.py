"""HTTP proxies from the environment: tunnels, absolute requests, exemptions, and whose credentials go where."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from contextlib import closing

import pytest
import trustme
from certificates import serving, trusting
from fault_server import Faults, FaultServer
from pilotflame.errors import SourceDenied, SourceError, SourceUnavailable
from pilotflame.snapshot.sources.http import HttpSource
from pilotflame.snapshot.sources.location import ServerAddress
from pilotflame.snapshot.sources.proxy import Proxy, proxy_for
from proxy_server import ProxyServer
from source_tests import read

HOST = "weights.test"
NAME = "model.safetensors"
DATA = random.Random(7).randbytes(300_000)
AUTHORITY = trustme.CA()
TOKEN = {"PILOTFLAME_SNAPSHOT_TOKEN": "origins-own"}
PAIR = base64.b64encode(b"me:pass word").decode()


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def secure() -> Iterator[FaultServer]:
    """The server of HOST, with TLS."""
    with FaultServer({NAME: DATA}, ssl_context=serving(AUTHORITY, HOST)) as found:
        yield found


@pytest.fixture
def plain() -> Iterator[FaultServer]:
    with FaultServer({NAME: DATA}) as found:
        yield found


def test_https_goes_through_a_tunnel_and_credentials_stay_apart(
    secure: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProxyServer({HOST: secure.port}) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:pass%20word@127.0.0.1:{proxy.port}")
        source = HttpSource(f"https://{HOST}/", ssl_context=trusting(AUTHORITY), secrets=TOKEN)
        assert read(source, NAME, len(DATA)) == DATA
        assert proxy.heads
        for head in proxy.heads:
            assert head.startswith(f"CONNECT {HOST}:443 HTTP/1.1\r\n")
            assert f"Proxy-Authorization: Basic {PAIR}".lower() in head.lower()
            assert "origins-own" not in head
    assert secure.requests
    for request in secure.requests:
        assert request.headers["authorization"] == "Bearer origins-own"
        assert request.headers["host"] == HOST
        assert "proxy-authorization" not in request.headers


def test_http_is_forwarded_in_absolute_form(plain: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with ProxyServer({HOST: plain.port}) as proxy:
        monkeypatch.setenv("http_proxy", f"me:pass%20word@127.0.0.1:{proxy.port}")
        source = HttpSource(f"http://{HOST}:81/?key=1", secrets=TOKEN)
        with closing(source.connect()) as connection:
            connection.begin(NAME, 0, 9)
            buffer = memoryview(bytearray(9))
            assert connection.read_into(buffer) == 9
        (head,) = proxy.heads
        assert head.startswith(f"GET http://{HOST}:81/{NAME}?key=1 HTTP/1.1\r\n")
        assert f"proxy-authorization: basic {PAIR}".lower() in head.lower()
    (request,) = plain.requests
    assert request.headers["host"] == f"{HOST}:81"
    assert request.headers["authorization"] == "Bearer origins-own"


def test_a_proxy_that_refuses_is_told_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    with ProxyServer({}, lambda _: b"HTTP/1.1 407 -\r\nContent-Length: 0\r\n\r\n") as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:hush@127.0.0.1:{proxy.port}")
        with (
            closing(HttpSource(f"https://{HOST}").connect()) as connection,
            pytest.raises(SourceDenied, match=f"the proxy http://127.0.0.1:{proxy.port} .*407") as caught,
        ):
            connection.begin(NAME, 0, 1)
    assert "hush" not in f"{caught.value}{caught.value.remedy}{caught.value.__cause__}"
    assert len(proxy.heads) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 3\r\n\r\nno!",
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 200 -\r\nX: " + b"x" * 70_000,
        b"HTTP/1.1 200 -\r\n\r\nHTTP/1.1 206 -\r\n\r\n",
    ],
)
def test_a_tunnel_that_fails_is_tried_again(
    secure: FaultServer, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    rest = iter([answer])
    with ProxyServer({HOST: secure.port}, lambda _: next(rest, None)) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        source = HttpSource(f"https://{HOST}", ssl_context=trusting(AUTHORITY))
        with closing(source.connect()) as connection:
            with pytest.raises(SourceUnavailable):
                connection.begin(NAME, 0, 1)
            assert connection.begin(NAME, 0, 1).size_bytes == len(DATA)


def test_the_certificate_is_that_of_the_server_and_not_of_the_proxy(
    secure: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProxyServer({"other.test": secure.port}) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        source = HttpSource("https://other.test", ssl_context=trusting(AUTHORITY), secrets=TOKEN)
        with closing(source.connect()) as connection, pytest.raises(SourceError, match="not trusted"):
            connection.begin(NAME, 0, 1)
    assert not secure.requests


def test_a_redirect_through_the_proxy_does_not_take_the_token_along(
    plain: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultServer({NAME: DATA}) as there:
        plain.faults = Faults(redirect="http://there.test/")
        with ProxyServer({HOST: plain.port, "there.test": there.port}) as proxy:
            monkeypatch.setenv("HTTP_PROXY", f"http://me:pass%20word@127.0.0.1:{proxy.port}")
            assert HttpSource(f"http://{HOST}", secrets=TOKEN).stat(NAME).size_bytes == len(DATA)
            assert [
                f"http://{host}/" in head
                for host, head in zip((HOST, "there.test"), proxy.heads, strict=True)
            ]
            assert "origins-own" not in proxy.heads[1]
        (request,) = there.requests
        assert "authorization" not in request.headers


# -- which proxy


def address(url: str) -> ServerAddress:
    return ServerAddress.of(url)


def test_each_scheme_has_its_proxy_and_lower_case_counts_first() -> None:
    environ = {
        "HTTP_PROXY": "http://one:3128", "HTTPS_PROXY": "http://two", "https_proxy": "http://[::1]:8080/",
    }  # fmt: skip
    assert proxy_for(address("http://h"), environ) == Proxy(ServerAddress("http", "one", 3128))
    assert proxy_for(address("https://h"), environ) == Proxy(ServerAddress("http", "::1", 8080))
    assert proxy_for(address("https://h"), {"HTTP_PROXY": "http://one", "HTTPS_PROXY": ""}) is None


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.8.7", "[::1]"])
def test_this_machine_is_reached_directly(host: str) -> None:
    assert proxy_for(address(f"http://{host}:8000"), {"HTTP_PROXY": "http://proxy"}) is None


@pytest.mark.parametrize(
    ("host", "exempt", "direct"),
    [
        ("weights.test", "weights.test", True),
        ("weights.test", "other, .TEST ", True),
        ("a.weights.test", "weights.test", True),
        ("a.weights.test", "*.weights.test", True),
        ("myweights.test", "weights.test", False),
        ("weights.test", "a.weights.test", False),
        ("weights.test:8443", "weights.test:8443", True),
        ("weights.test:8443", "weights.test:443", False),
        ("weights.test", "weights.test:443", True),
        ("weights.test", "*", True),
        ("weights.test", ", ,.", False),
        ("10.1.2.3", "10.0.0.0/8", True),
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.3:9000", "10.1.2.3:9000", True),
        ("11.1.2.3", "10.0.0.0/8,11", False),
        ("110.1.2.3", "10.1.2.3", False),
        ("[fd00::1]", "fd00::/8", True),
        ("[fd00::1]", "[fd00::1]", True),
        ("[fd00::1]:81", "[fd00::1]:443", False),
        ("[fd00::1]", "10.0.0.0/8", False),
    ],
)
def test_no_proxy_exempts_hosts(host: str, exempt: str, direct: bool) -> None:
    environ = {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": exempt}
    assert (proxy_for(address(f"https://{host}"), environ) is None) is direct


@pytest.mark.parametrize(
    "url", ["socks5://me:hush@proxy", "https://me:hush@proxy", "http://me:hush@:x/", "http://"]
)
def test_a_proxy_that_cannot_be_used_is_refused_without_its_password(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", url)
    with pytest.raises(SourceError, match="HTTPS_PROXY") as caught:
        HttpSource(f"https://{HOST}").stat(NAME)
    assert "hush" not in f"{caught.value}{caught.value.remedy}"
    assert "hush" not in repr(Proxy(ServerAddress("http", "proxy", 80), {"Proxy-Authorization": "hush"}))
