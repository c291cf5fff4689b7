"""Uploads of output files to a server that is busy, redirects by Location, or refuses."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from pilotflame.errors import OutputInvalid
from pilotflame.handlers.contract import Context
from pilotflame.runtime.plugins.cog.uploads import TRIES, Uploader

CONTEXT = Context("f", "r1", invocation_id="p1")


class Bucket(HTTPServer):
    """Answers with `statuses` in order, then 200, and records (path, headers, body)."""

    statuses: list[int]
    came: list[tuple[str, Any, bytes]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/out"


class Put(BaseHTTPRequestHandler):
    server: Bucket

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.came.append((self.path, self.headers, body))
        self.send_response(self.server.statuses.pop(0) if self.server.statuses else 200)
        self.send_header("Location", "https://files.example/final.txt?signature=1")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setenv("PILOTFLAME_INPUT_NETWORKS", "127.0.0.0/8")
    with Bucket(("127.0.0.1", 0), Put) as server:
        server.statuses, server.came = [], []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def uploader(bucket: Bucket) -> Uploader:
    found = Uploader.of({"asynchronous": True}, CONTEXT, {"PILOTFLAME_UPLOAD_URL": bucket.url})
    assert found is not None
    return found


def test_a_busy_server_is_asked_again(bucket: Bucket, tmp_path: Path) -> None:
    bucket.statuses = [503]
    file = tmp_path / "a b.txt"
    file.write_bytes(b"content")
    assert uploader(bucket)(file, "answer") == "https://files.example/final.txt"
    assert [(path, body) for path, _, body in bucket.came] == [("/out/a%20b.txt", b"content")] * 2
    assert bucket.came[0][1]["X-Prediction-ID"] == "p1"
    assert bucket.came[0][1]["Content-Type"] == "text/plain"


@pytest.mark.parametrize(("statuses", "count"), [([403], 1), ([503] * TRIES, TRIES)])
def test_a_server_that_refuses(bucket: Bucket, statuses: list[int], count: int) -> None:
    bucket.statuses = statuses
    with pytest.raises(OutputInvalid, match="answer cannot be uploaded"):
        uploader(bucket)(io.StringIO("text"), "answer")
    assert len(bucket.came) == count


def test_our_own_network_is_not_uploaded_to(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PILOTFLAME_INPUT_NETWORKS")
    with pytest.raises(OutputInvalid, match="loopback"):
        uploader(bucket)(io.BytesIO(b"x"), "answer")
    assert bucket.came == []


@pytest.mark.parametrize("about", [{}, {"asynchronous": False}])
def test_callers_who_wait_get_data_urls(about: dict[str, Any]) -> None:
    assert Uploader.of(about, CONTEXT, {"PILOTFLAME_UPLOAD_URL": "https://x"}) is None
    assert Uploader.of({"asynchronous": True}, CONTEXT, {}) is None
