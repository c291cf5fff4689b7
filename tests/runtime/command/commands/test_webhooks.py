"""`pilotflame webhooks` against a real gateway and a receiver that refuses the first delivery."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import Queue
from typing import Any

import pytest

Run = Callable[..., Any]
ECHO = "def handler(event):\n    return event\n"


@pytest.fixture
def does(deployed: Callable[..., str]) -> str:
    return deployed(ECHO)


class _Receiver(BaseHTTPRequestHandler):
    """Refuses the first delivery permanently, and accepts the others."""

    received: Queue[str]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        first = not hasattr(self.server, "seen")
        self.server.seen = True  # type: ignore[attr-defined]
        self.send_response(410 if first else 204)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.received.put(self.headers["webhook-id"])

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def receiver() -> Iterator[tuple[str, Queue[str]]]:
    received: Queue[str] = Queue()
    with HTTPServer(("127.0.0.1", 0), type("Receiver", (_Receiver,), {"received": received})) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/done?token=hidden", received
        server.shutdown()
        thread.join()


def test_deliveries_are_listed_and_sent_again(pilotflame: Run, does: str, receiver: tuple[str, Queue[str]]):
    url, received = receiver
    job = pilotflame("run", does, "1", "--webhook", url).stdout.strip()
    delivery = received.get(timeout=20)
    found = ended(pilotflame, does, job, "DEAD")
    assert (found["id"], found["job_id"], found["last_status"]) == (delivery, job, 410)
    assert found["url"] == url.removesuffix("?token=hidden")
    assert [tried["status"] for tried in found["log"]] == [410]
    assert pilotflame("webhooks", "redeliver", does, delivery).stdout.startswith(
        f"{delivery} is sent to http://127"
    )
    assert received.get(timeout=20) == delivery
    assert ended(pilotflame, does, job, "DELIVERED")["last_status"] == 204
    shown = pilotflame("webhooks", "list", does, "--state", "delivered").stdout
    for text in (delivery, job, "completed", "DELIVERED", "204"):
        assert text in shown
    assert "hidden" not in shown
    none = pilotflame("webhooks", "list", does, "--job", "job-aaaaaaaaaaaaaaaaaaaaaaaaaa")
    assert (none.returncode, none.stdout) == (0, "")
    secret = pilotflame("webhooks", "secret", does).stdout.strip()
    assert secret.startswith("whsec_")
    told = pilotflame("webhooks", "secret", does, "--json").stdout
    assert json.loads(told) == {"function": does, "secret": secret}


def ended(pilotflame: Run, name: str, job: str, state: str) -> dict[str, Any]:
    """Return the job's delivery once it is in this state. The receiver gets it a moment before the gateway
    stores the state.
    """
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        told = pilotflame("webhooks", "list", name, "--job", job, "--state", state, "--json").stdout
        if found := json.loads(told)["deliveries"]:
            return dict(found[0])
    raise AssertionError(f"no {state} delivery of {job}")
