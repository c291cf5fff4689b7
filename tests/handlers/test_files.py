"""Input files: what is downloaded, what is refused, and that all are deleted."""

from __future__ import annotations

import enum
import io
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from pilotflame.addresses import INPUT_NETWORKS
from pilotflame.errors import OutputInvalid
from pilotflame.handlers import files
from pilotflame.handlers.files import InputFiles, with_urls
from pydantic import BaseModel


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow files from this machine."""
    monkeypatch.setenv(INPUT_NETWORKS, "127.0.0.0/8")


@pytest.fixture
def endless() -> Iterator[str]:
    """A server that announces a thousand bytes and sends three."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc")
                ended.wait(30)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/a%20b.tar.gz?x=/y"
        ended.set()
        thread.join()


def test_a_source_that_falls_silent_is_given_up_within_the_invocations_time(endless: str) -> None:
    with InputFiles(lambda: 50) as found, pytest.raises(ValueError, match="cannot be fetched: timed out"):
        found.fetch(endless)
    with InputFiles(lambda: 0) as found, pytest.raises(ValueError, match="cannot be fetched"):
        found.fetch("data:,x")


def test_too_large_is_refused_and_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 6)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with InputFiles() as found:
        assert found.fetch("data:,abc").read_bytes() == b"abc"
        # The limit is for all files together.
        with pytest.raises(ValueError, match="larger than"):
            found.fetch("data:,abcd")
        assert len(list(tmp_path.iterdir())) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "suffix"),
    [
        ("data:text/plain;name=x.md,a", ".md"),
        ("data:text/plain;name=x/y,a", ".txt"),
        ("data:;name=.,a", ".txt"),
    ],
)
def test_a_data_url_can_have_a_name(url: str, suffix: str) -> None:
    with InputFiles() as found:
        assert found.fetch(url).suffix == suffix


def test_a_path_of_the_gateway_is_not_told(tmp_path: Path) -> None:
    known = {"/replicate/v1/files/1": str(tmp_path / "content")}
    with InputFiles(known=known) as found:
        with pytest.raises(
            ValueError, match="/replicate/v1/files/1 cannot be fetched: No such file"
        ) as failed:
            found.fetch("/replicate/v1/files/1")
        assert str(tmp_path) not in str(failed.value)
        (tmp_path / "content").write_bytes(b"1")
        assert found.fetch("/replicate/v1/files/1").read_bytes() == b"1"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file:///etc/passwd", "not the address of a file"),
        ("ftp://x/y", "not the address of a file"),
        ("", "not the address of a file"),
        ("http://", "cannot be fetched"),
        ("http://[::1", "Invalid IPv6"),
        ("data:;base64,***x", "cannot be fetched"),
        ("http://127.0.0.1:1/" + "x" * 500, "…"),
    ],
)
def test_what_is_no_address(url: str, why: str) -> None:
    with InputFiles() as found, pytest.raises(ValueError, match=why):
        found.fetch(url)


@pytest.mark.parametrize(
    ("url", "kind", "suffix"),
    [
        ("https://x/a/photo.jpeg?y=1", "text/plain", "photo.jpeg"),
        ("https://x/%2e%2e%2fetc%2Fpasswd", "text/plain", ".._etc_passwd"),
        ("https://x/", "text/plain", ""),
        ("https://x/" + "é" * 200 + ".png", "text/plain", "é" * 48 + ".png"),
        ("data:image/png;base64,", "image/png", ".png"),
        ("data:odd/odd,", "odd/odd", ""),
    ],
)
def test_a_files_name_ends_as_its_address_does(url: str, kind: str, suffix: str) -> None:
    headers = Message()
    headers["Content-Type"] = kind
    assert files._suffix(url, headers) == suffix


# -- output files


class Colour(enum.Enum):
    RED = "red"


class Named(BaseModel):
    part: Any


@dataclass
class Sized:
    part: Any


@pytest.mark.parametrize(
    ("output", "made"),
    [
        (1.5, 1.5),
        (Colour.RED, "red"),
        ([Colour.RED, (b"x",)], ["red", ["x"]]),
        ({"a": Named(part=Sized(Colour.RED))}, {"a": {"part": {"part": "red"}}}),
        (bytearray(b"\xff"), "data:application/octet-stream;base64,/w=="),
        (io.BytesIO(b"a"), "data:application/octet-stream;base64,YQ=="),
        (io.StringIO("a"), "data:application/octet-stream;base64,YQ=="),
    ],
)
def test_files_and_bytes_of_an_output_become_text(output: Any, made: Any) -> None:
    assert with_urls(output) == made


def test_a_file_is_read_from_its_beginning_and_its_name_gives_the_type(tmp_path: Path) -> None:
    (tmp_path / "a.WEBP").write_bytes(b"abc")
    with (tmp_path / "a.WEBP").open("rb") as opened:
        opened.read(2)
        assert with_urls([opened, tmp_path / "a.WEBP"]) == ["data:image/webp;base64,YWJj"] * 2


def test_a_published_file_and_one_that_cannot_be_read_are_named_by_their_place(tmp_path: Path) -> None:
    output = {"images": [tmp_path / "none.png"]}
    assert with_urls(output, publish=lambda file, path: f"{file.name} {path}") == {  # type: ignore[union-attr]
        "images": ["none.png answer.images[0]"]
    }
    with pytest.raises(OutputInvalid, match=r"answer\.images\[0\] is the file .*none\.png.*No such file"):
        with_urls(output)
    (closed := io.BytesIO()).close()
    with pytest.raises(OutputInvalid, match="which cannot be read"):
        with_urls(closed)
