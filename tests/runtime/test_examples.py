"""The examples in templates/examples on a real gateway: each is deployed as it is, and gives the right answer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from pilotflame.runtime.command.client.client import Client

EXAMPLES = Path(__file__).parents[2] / "templates" / "examples"
LIMIT_S = 30
Example = Callable[..., Path]


@pytest.fixture
def client(served: str) -> Iterator[Client]:
    with Client(served) as client:
        yield client


@pytest.fixture
def deployed(client: Client, tmp_path: Path) -> Iterator[Example]:
    """`deployed(name)` makes the example's weights, deploys the example and returns its folder. The test's end deletes the function."""
    names: list[str] = []

    def deploy(name: str, **overrides: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(EXAMPLES / name, folder)
        if (folder / "make_weights.py").exists():
            subprocess.run([sys.executable, "make_weights.py"], cwd=folder, check=True)
        names.append(client.deploy(folder, overrides=overrides)["name"])
        return folder

    yield deploy
    for name in names:
        client.delete("v1", "functions", name)


def answer(
    client: Client, folder: Path, file: str = "test_input.json", media: str = "application/json"
) -> Any:
    with client.call(folder.name, (folder / file).read_bytes(), content_type=media) as reply:
        return reply.value()


def test_a_text_is_classified(client: Client, deployed: Example) -> None:
    shares = answer(client, deployed("classifier"))
    assert max(shares, key=shares.get) == "delivery"
    assert sum(shares.values()) == pytest.approx(1)


def test_an_image_is_classified(client: Client, deployed: Example) -> None:
    pytest.importorskip("PIL")
    shares = answer(client, deployed("image"), "circle.png", "image/png")
    assert max(shares, key=shares.get) == "circle"


def test_speech_becomes_text(client: Client, deployed: Example) -> None:
    pytest.importorskip("pocketsphinx")
    assert answer(client, deployed("speech"), "hello.wav", "audio/wav") == {"text": "hello world"}


def test_two_snapshots_and_an_adapter(client: Client, deployed: Example) -> None:
    assert len(answer(client, deployed("two-snapshots"))) == 2
    assert len(answer(client, deployed("adapter"))) == 32


def test_a_stream(client: Client, deployed: Example) -> None:
    assert answer(client, deployed("streaming")) == [{"left": left} for left in (3, 2, 1, 0)]


class Told(BaseHTTPRequestHandler):
    """Receives webhooks, and keeps their bodies in `server.told`."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()
        self.server.told.put(json.loads(body))  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def told() -> Iterator[tuple[str, Queue[Any]]]:
    """An address for webhooks, and the queue of the bodies that arrive there."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Told) as server:
        server.told = Queue()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/done", server.told  # type: ignore[attr-defined]
        server.shutdown()
        thread.join(LIMIT_S)


def test_a_job_with_progress_and_a_webhook(
    client: Client, deployed: Example, told: tuple[str, Queue[Any]]
) -> None:
    event = json.loads((deployed("webhook-job") / "test_input.json").read_text())
    url, bodies = told
    job = client.submit("webhook-job", {"input": event, "webhook": url})
    body = bodies.get(timeout=LIMIT_S)
    assert job["id"] in json.dumps(body)
    assert body["data"]["output"] == {"pages": 3}


def test_a_message_of_a_queue(client: Client, deployed: Example) -> None:
    """Call the example without its queue. tests/test_how_to.py sends messages through a queue."""
    assert answer(client, deployed("queue", source=[])) == {"id": "order-7", "total": 10.0}


def test_handlers_of_runpod_and_cog(client: Client, deployed: Example) -> None:
    assert answer(client, deployed("from-runpod")) == {"words": 5}
    assert answer(client, deployed("from-cog")) == "HELLO!!"
