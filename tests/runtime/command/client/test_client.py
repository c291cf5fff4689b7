"""The client: parsing streams, calls to a gateway, and errors as the classes that the gateway raised."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import (
    BadInput,
    GatewayError,
    GatewayUnreachable,
    SettingsError,
    Unauthorized,
    UnknownFunction,
)
from pilotflame.runtime.command.client import connection
from pilotflame.runtime.command.client.client import Client
from pilotflame.runtime.command.client.events import parse_events, split_lines
from pilotflame.runtime.node.packaging.code import pack


def answer(client: Client, name: str, event: object) -> Any:
    """Invoke a function, and return its whole answer."""
    with client.call(name, json.dumps(event).encode()) as reply:
        return reply.value()


@pytest.fixture
def client(served: str) -> Iterator[Client]:
    with Client(served) as found:
        yield found


ASKED: list[tuple[str, str, str | None]] = []
"""The methods, paths and keys of the requests that the fixture `server` has got."""


@pytest.fixture
def server() -> Iterator[Callable[[int, str, bytes], str]]:
    """`server(status, content_type, body)` starts a server that is not a gateway, and returns its address."""
    servers: list[tuple[HTTPServer, threading.Thread]] = []
    ASKED.clear()

    def serve(status: int, content_type: str, body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                ASKED.append((self.command, self.path, self.headers.get("Authorization")))
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                if status == 302:
                    self.send_header("Location", "/login")
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST  # noqa: N815

            def log_message(self, *_arguments: object) -> None: ...

        found = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        servers.append((found, thread))
        return f"http://127.0.0.1:{found.server_port}"

    yield serve
    for found, thread in servers:
        found.shutdown()
        thread.join()
        found.server_close()


# -- parsing


@given(
    st.lists(st.text(alphabet=st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]))), st.data()
)
def test_lines_survive_any_cut(lines: list[str], data: st.DataObject):
    text = "".join(line + "\n" for line in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert list(split_lines(chunks)) == lines


def test_events_of_every_shape():
    stream = (
        b": waiting\n\nid: 1\nevent: output\ndata: {}\n\n"
        b"data:no space\r\ndata: two lines\r\n\r\n"
        b"event: empty\n\n"
        b'event: output\ndata: "a\xe2\x80\xa8b"\n\n'
        b"event: output\ndata: cut off"
    )
    assert list(parse_events([stream])) == [
        ("output", "{}"),
        ("message", "no space\ntwo lines"),
        ("output", '"a\u2028b"'),
    ]


# -- a gateway


def test_a_function_from_deploy_to_delete(client: Client, tmp_path: Path):
    (tmp_path / "handler.py").write_text("def handler(event):\n    print(event)\n    return [event]\n")
    for deployed in (
        client.deploy(tmp_path, {"name": "client-life"}),
        client.upload(pack(tmp_path), {"name": "client-life"}, folder="any"),
    ):
        name = deployed["name"]
        assert answer(client, name, {"a": "ä"}) == [{"a": "ä"}]
    assert name in [status["name"] for status in client.get("v1", "functions")["functions"]]
    assert client.get("v1", "functions", name, memory=1)["processes"]
    assert "{'a': 'ä'}" in [line["text"] for line in client.logs(name)]
    workers = client.post("v2", name, "warmup", workers=1)["workers"]
    assert set(workers) == {"ready", "parked", "starting", "draining"}
    client.delete("v1", "functions", name)
    with pytest.raises(UnknownFunction, match=name):
        client.get("v1", "functions", name)


def test_a_stream_as_a_list(client: Client, tmp_path: Path):
    (tmp_path / "handler.py").write_text("def handler(event):\n    yield from range(event)\n")
    client.deploy(tmp_path, overrides={"name": "client-stream"})
    assert answer(client, "client-stream", 3) == [0, 1, 2]
    with client.call("client-stream", b"2") as reply:
        assert reply.streaming
        assert reply.request_id
        assert list(reply.pieces()) == [0, 1]
    client.delete("v1", "functions", "client-stream")


def test_errors_keep_their_class(client: Client, tmp_path: Path):
    with pytest.raises(UnknownFunction):
        answer(client, "nobody", None)
    with pytest.raises(UnknownFunction):
        # A name is one segment of the path, whatever it contains.
        answer(client, "../v1/functions", None)
    (tmp_path / "handler.py").write_text("def handler(event):\n    return event\n")
    with pytest.raises(SettingsError, match=r"scale\.max"):
        client.deploy(tmp_path, overrides={"scale.maxx": "1"})
    client.deploy(tmp_path, overrides={"name": "client-bad"})
    with pytest.raises(BadInput), client.call("client-bad", b"{"):
        pass
    client.delete("v1", "functions", "client-bad")


# -- no gateway


def test_no_gateway_at_the_address():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with (
            Client(f"http://127.0.0.1:{taken.getsockname()[1]}") as client,
            pytest.raises(GatewayUnreachable),
        ):
            client.get("v1", "functions")


@pytest.mark.parametrize("url", ["localhost:8600", "ftp://here", "http://", "http://[::1", ""])
def test_a_malformed_address(url: str):
    with pytest.raises(GatewayError, match="not a gateway's address"):
        Client(url)


@pytest.mark.parametrize("status", [200, 404, 502])
def test_another_server_answers(server, status: int):
    url = server(status, "text/html", b"<h1>Hello\n there</h1>")
    with Client(url) as client, pytest.raises(GatewayError, match=f"answered {status}, .*Hello there"):
        client.get("v1", "functions")


def test_the_default_address_is_asked_for_its_name_before_anything_is_sent(
    server: Callable[[int, str, bytes], str], served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server(200, "application/json", b'{"name": "other", "functions": []}')
    assert Client(url.replace("http://", "http://me:secret@")).url == url
    with Client(url) as client:
        assert client.get("v1", "functions")["functions"] == []
    monkeypatch.setattr(connection, "DEFAULT_URL", url)
    ASKED.clear()
    with Client(url, api_key="pf_x") as client:
        for _ in range(2):
            with pytest.raises(GatewayError, match="answered 200, and not as a gateway does"):
                client.get("v1", "functions")
    assert ASKED == [("GET", "/", None)] * 2
    monkeypatch.setattr(connection, "DEFAULT_URL", served)
    with Client(served) as client:
        assert "functions" in client.get("v1", "functions")


def test_a_redirect_and_an_address_with_a_password(server: Callable[[int, str, bytes], str]) -> None:
    url = server(302, "text/html", b"")
    with Client(url) as client, pytest.raises(GatewayError, match=r"302.*/login"):
        client.get("v1", "functions")
    with pytest.raises(Unauthorized, match="user or a password"):
        Client(url.replace("http://", "http://me:secret@"), api_key="pf_x")


def test_a_stream_that_breaks_off(server):
    body = b"event: output\ndata: 1\n\nevent: output\ndata: 2"
    with Client(server(200, "text/event-stream", body)) as client, client.call("f") as reply:
        pieces = reply.pieces()
        assert next(pieces) == 1
        with pytest.raises(GatewayError, match="broke off"):
            next(pieces)


def test_an_unknown_error_keeps_its_message(server):
    body = json.dumps(
        {"error": {"type": "not_known_yet", "message": "Something.", "remedy": "Do it."}}
    ).encode()
    with (
        Client(server(418, "application/json", body)) as client,
        pytest.raises(Exception, match=r"Something\. Do it\."),
    ):
        client.get("v1", "functions")


def test_a_cut_off_stream_does_not_mean_that_the_job_ended(server: Callable[[int, str, bytes], str]):
    cut = b'event: output\nid: 1\ndata: {"n": 0}\n\nevent: outp'
    with Client(server(200, "text/event-stream", cut)) as client:
        events = client.follow("f", "job-1")
        assert next(events) == ("output", {"n": 0})
        with pytest.raises(GatewayError, match="the job goes on"):
            next(events)
