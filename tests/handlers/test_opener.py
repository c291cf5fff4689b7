"""Opening callers' URLs connects only to allowed addresses, whatever names and redirects resolve to."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import URLError

import pytest
from pilotflame.addresses import INPUT_NETWORKS, Addresses
from pilotflame.handlers.files import InputFiles
from pilotflame.handlers.opener import connected, encoded, opener
from pilotflame.snapshot.sources.dialer import Dialer

targets: list[str] = []
HERE = {INPUT_NETWORKS: "127.0.0.1, ::1"}


URLS = {
    "/bild a.png": "/bild%20a.png", "/bildä.png": "/bild%C3%A4.png", "/x?q=a b": "/x?q=a%20b", "/a%20b": "/a%20b",
    "/100%.png": "/100%.png", "/日本/x.png?é=1#ä": "/%E6%97%A5%E6%9C%AC/x.png?%C3%A9=1", "/a[1].png": "/a[1].png",
    "/a\tb": "/ab", "/x?sig=a%2Fb+c==": "/x?sig=a%2Fb+c==", "/a\x7fb": "/a%7Fb",
}  # fmt: skip
"""The target of a caller's URL, and the target that the server gets."""


class Answers(BaseHTTPRequestHandler):
    """Redirects to the path's `to`, else sends a body. /short announces more than it sends."""

    def do_GET(self) -> None:
        targets.append(self.path)
        target = self.path.partition("?to=")[2]
        self.send_response(302 if target else 200)
        if target:
            self.send_header("Location", target)
        self.send_header("Content-Length", "9" if self.path == "/short" else "0" if target else "4")
        self.end_headers()
        if not target:
            self.wfile.write(b"body")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()
        thread.join()


def test_what_is_allowed_is_opened_and_redirects_are_followed(server: str) -> None:
    for path in ("/", f"/?to={server}/there", "/?to=/there"):
        with opener(HERE).open(server + path, timeout=10) as answer:
            assert answer.read() == b"body"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/", "https://127.0.0.1:1/", "http://localhost:1/", "http://[::1]:1/", "http://0x7f.1:1/",
            "http://169.254.169.254/latest/meta-data/", "http://10.1.2.3/", "http://[::ffff:10.1.2.3]/"],
)  # fmt: skip
def test_our_own_network_is_refused_by_default(url: str) -> None:
    with pytest.raises(URLError, match="fetching from its address is not allowed"):
        opener({}).open(url, timeout=10)


def test_redirects_are_checked_too(server: str) -> None:
    for target in ("http://127.0.0.2:1/", "http://169.254.169.254/", "https://10.0.0.1/"):
        with pytest.raises(URLError, match="fetching from its address is not allowed"):
            opener(HERE).open(f"{server}/?to={target}", timeout=10)
    for target in ("file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x"):
        with pytest.raises(URLError):
            opener(HERE).open(f"{server}/?to={target}", timeout=10)


def test_what_counts_is_what_a_name_resolves_to(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = int(server.rpartition(":")[2])
    own = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
    private = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", port))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [private, own])
    connected("rebound.example", port, 10, Dialer(Addresses.of(["127.0.0.1"]))).close()
    with pytest.raises(PermissionError, match="private"):
        connected("rebound.example", port, 10, Dialer(Addresses()))


def test_no_proxy_is_asked(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server)
    with pytest.raises(URLError, match="fetching from its address is not allowed"):
        opener({}).open("http://169.254.169.254/", timeout=10)


def test_networks_that_are_none_are_said() -> None:
    with pytest.raises(ValueError, match=f"{INPUT_NETWORKS} is malformed: 'here'"):
        opener({INPUT_NETWORKS: "here"})


def test_what_ends_early_is_refused(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INPUT_NETWORKS, "127.0.0.1")
    with InputFiles() as found:
        assert found.fetch(server).read_bytes() == b"body"
        with pytest.raises(ValueError, match="ended 5 bytes early"):
            found.fetch(f"{server}/short")


@pytest.mark.parametrize(("sent", "target"), URLS.items())
def test_the_url_of_a_file_may_have_spaces_and_all_letters(
    server: str, monkeypatch: pytest.MonkeyPatch, sent: str, target: str
) -> None:
    monkeypatch.setenv(INPUT_NETWORKS, "127.0.0.1")
    with InputFiles() as files:
        assert files.fetch(server + sent).read_text() == "body"
    assert targets[-1] == target


def test_a_host_may_have_all_letters() -> None:
    assert encoded("https://bücher.example/ä") == "https://xn--bcher-kva.example/%C3%A4"
    assert encoded("data:text/plain,a b ä") == "data:text/plain,a b ä"
