"""Handlers whose imports leave things open: random mixtures, and what their answers must be.

Each ingredient is a piece of a module and an expression of its `handler`. The answers of two workers are compared with
the event, with each other, and with a plain process that runs the same module ("home").
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

# Each event is a number from 0 to EVENTS - 1.
EVENTS = 50
# The files in the folder of each handler.
FILES = {"lines.txt": "".join(f"{number:6}\n" for number in range(1000))}


@dataclass(frozen=True)
class Ingredient:
    """What a module does at its import, and what its handler answers.

    The answer is the event ("echo"), the same as at home ("home"), or a number that no other worker draws ("own").
    """

    imported: str
    answer: str
    kind: Literal["echo", "home", "own"]
    forks: bool
    """True if its workers must be forked."""


INGREDIENTS = {
    "connection": Ingredient(
        """
import http.client
CONNECTION = http.client.HTTPConnection("127.0.0.1", int(os.environ["PORT"]))
def over_connection(event):
    CONNECTION.request("POST", "/", body=str(event))
    return int(CONNECTION.getresponse().read())
over_connection(0)
""", "over_connection(event)", "echo", False,
    ),
    "sockets": Ingredient(
        """
import socket
NEAR, FAR = socket.socketpair()
def over_sockets(event):
    NEAR.sendall(f"{event:8}".encode())
    return int(FAR.recv(8, socket.MSG_WAITALL))
""", "over_sockets(event)", "echo", False,
    ),
    "pipe": Ingredient(
        """
READ, WRITE = os.pipe()
def over_pipe(event):
    os.write(WRITE, f"{event:8}".encode())
    return int(os.read(READ, 8))
""", "over_pipe(event)", "echo", False,
    ),
    "loop": Ingredient(
        """
import asyncio
LOOP = asyncio.new_event_loop()
def on_loop(event):
    return LOOP.run_until_complete(asyncio.wait_for(LOOP.run_in_executor(None, int, event), 20))
""", "on_loop(event)", "echo", False,
    ),
    "helper": Ingredient(
        """
import subprocess, sys
ECHO = "import sys\\nfor line in sys.stdin: print(line, end='', flush=True)"
HELPER = subprocess.Popen([sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
def to_helper(event):
    assert HELPER.poll() is None
    HELPER.stdin.write(f"{event}\\n".encode())
    HELPER.stdin.flush()
    return int(HELPER.stdout.readline())
""", "to_helper(event)", "echo", False,
    ),
    "memory": Ingredient(
        """
import mmap, time
MEMORY = mmap.mmap(-1, 8)
def in_memory(event):
    MEMORY[:] = f"{event:8}".encode()
    time.sleep(0.001)
    return int(MEMORY[:])
""", "in_memory(event)", "echo", False,
    ),
    "scratch": Ingredient(
        """
import tempfile, time
SCRATCH = tempfile.mkdtemp()
def in_scratch(event):
    with open(SCRATCH + "/file", "w") as file:
        file.write(str(event))
    time.sleep(0.001)
    with open(SCRATCH + "/file") as file:
        return int(file.read() or -1)
""", "in_scratch(event)", "echo", False,
    ),
    "clock": Ingredient("import random, time\nCLOCK = random.Random(time.time())", "CLOCK.random()", "own", False),
    "lines": Ingredient("NUMBERS = open('lines.txt')\nNUMBERS.readline()", "NUMBERS.readline()", "home", True),
    "bytes": Ingredient("RAW = open('lines.txt', 'rb', buffering=0)", "RAW.read(7).decode()", "home", True),
    "archive": Ingredient(
        """
import zipfile
if not os.path.exists("lines.zip"):
    with zipfile.ZipFile("lines.zip", "w") as archive:
        for number in range(50):
            archive.writestr(str(number), str(number) * 1000)
ARCHIVE = zipfile.ZipFile("lines.zip")
""", "int(ARCHIVE.read(str(event))[: len(str(event))])", "echo", True,
    ),
    "log": Ingredient("LOG = open('log.txt', 'a')", "LOG.write('line\\n')", "home", True),
    "random": Ingredient("import random\nBY_CHANCE = random.Random()", "BY_CHANCE.random()", "own", True),
    "random, seeded": Ingredient("import random\nCHOSEN = random.Random(7)\nCHOSEN.random()", "CHOSEN.random()", "home", True),
    "global": Ingredient("import random\nrandom.random()", "random.random()", "own", True),
    "global, seeded": Ingredient("import random\nrandom.seed(11)", "random.random()", "home", True),
    "numpy": Ingredient(
        "import numpy\nDRAWS = [numpy.random.default_rng()]\nPLACES = {'a': numpy.random.RandomState()}",
        "[DRAWS[0].random(), PLACES['a'].normal()]", "own", True,
    ),
    "numpy, seeded": Ingredient(
        "import numpy\nSEEDED = numpy.random.default_rng(5)\nOLD = numpy.random.RandomState(6)\nOLD.normal()",
        "[SEEDED.random(), OLD.normal()]", "home", True,
    ),
    "numpy's global, seeded": Ingredient("import numpy\nnumpy.random.seed(3)", "numpy.random.random()", "home", True),
    "torch, seeded": Ingredient(
        "import torch\ntorch.manual_seed(0)\nT = torch.Generator()",
        "[torch.rand(()).item(), torch.rand((), generator=T).item()]", "home", True,
    ),
    "torch, by chance": Ingredient(
        "import torch\nclass Holder: pass\nHOLDER = Holder()\nHOLDER.made = [torch.Generator()]\nHOLDER.made[0].seed()",
        "torch.rand((), dtype=torch.float64, generator=HOLDER.made[0]).item()", "own", False,
    ),
    "torch": Ingredient("import torch\ntorch.rand(())", "torch.rand((), dtype=torch.float64).item()", "own", True),
}  # fmt: skip
# Pairs that no mixture contains together: one ingredient changes the numbers that the other draws.
APART = [{"global", "global, seeded"}, {"torch", "torch, seeded"}]


def handler_of(names: Collection[str]) -> str:
    """Return a module with these ingredients."""
    imported = "\n".join(INGREDIENTS[name].imported for name in names)
    answers = ", ".join(f"{name!r}: {INGREDIENTS[name].answer}" for name in names)
    return f"""
import os, time
COUNT = 0
{imported}
def handler(event):
    global COUNT
    COUNT += 1
    # A worker with faster calls gets all of them.
    time.sleep(0.005)
    return {{"pid": os.getpid(), "event": event, "count": COUNT, "answers": {{{answers}}}}}
"""


def at_home(names: Collection[str], folder: Path, port: int, calls: int) -> list[dict[str, Any]]:
    """Return what a plain process answers to `calls` calls."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    program = f"""{handler_of(names)}
import json
print(json.dumps([handler(number % {EVENTS}) for number in range({calls})]), flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True, timeout=60,
        env={"PORT": str(port), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    return list(json.loads(done.stdout))


def check(names: Collection[str], answers: list[dict[str, Any]], home: list[dict[str, Any]]) -> None:
    """Compare the answers of all workers with the events and with home, and the workers' numbers with each other."""
    by_worker = defaultdict[int, list[dict[str, Any]]](list)
    for answer in sorted(answers, key=lambda answer: answer["count"]):
        by_worker[answer["pid"]].append(answer)
    assert len(by_worker) == 2
    for name in names:
        kind = INGREDIENTS[name].kind
        seen: list[str] = []
        for worker in by_worker.values():
            found = [answer["answers"][name] for answer in worker]
            if kind == "echo":
                assert found == [answer["event"] for answer in worker], name
            elif kind == "home":
                assert found == [answer["answers"][name] for answer in home[: len(found)]], name
            seen += map(str, found)
        assert kind != "own" or len(set(seen)) == len(seen), name


@contextlib.contextmanager
def echo_server() -> Iterator[int]:
    """Yield the port of an HTTP server that answers with what it gets, and keeps connections."""

    class Echo(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def ask(function: Any, calls: int) -> list[dict[str, Any]]:
    """Call the function, four calls at a time, and return the answers."""
    places = asyncio.Semaphore(4)

    async def call(number: int) -> dict[str, Any]:
        async with places:
            return dict(await function.answer(number % EVENTS))

    return await asyncio.gather(*map(call, range(calls)))
