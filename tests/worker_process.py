"""A worker in a separate process, over a real socket pair: the test is its gateway."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from pilotflame.runtime.calls.link.frames import Frame, FrameKind, FrameReader, encode_json
from pilotflame.runtime.calls.link.worker_spec import WorkerSpec

LIMIT_S = 60.0
PROGRAM = """
import socket, sys
from pilotflame.runtime.calls.link.worker_spec import WorkerSpec
from pilotflame.runtime.calls.worker.function_setup import build
from pilotflame.runtime.calls.leftovers.signals import AuthorsHandlers
from pilotflame.runtime.calls.worker.worker import WorkerConnection
from pilotflame.runtime.calls.worker.zygote import worker_of
spec = WorkerSpec.model_validate_json(sys.argv[2])
worker_of(spec, build(spec), AuthorsHandlers()).run(WorkerConnection(socket.socket(fileno=int(sys.argv[1]))))
sys.stdout.flush()
"""


class WorkerProcess:
    """A worker of a handler given as text."""

    def __init__(self, folder: Path, text: str, **spec: Any) -> None:
        (folder / "handler.py").write_text(textwrap.dedent(text))
        self.folder = folder
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(LIMIT_S)
        revision = WorkerSpec(function="tone", revision="r1-abc", code=folder, threads=1, **spec)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(theirs.fileno()), revision.model_dump_json()],
            pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        theirs.close()
        self._reader = FrameReader()
        self._frames: list[Frame] = []

    def send(
        self, kind: FrameKind, channel: int = 0, head: dict[str, Any] | None = None, payload: bytes = b""
    ) -> None:
        self.sock.sendall(encode_json(kind, channel, head or {}, payload))

    def frame(self) -> Frame | None:
        """Return the next frame, or None at the end. Skip WINDOW, PRIMED and COPIED, which arrive at any
        time.
        """
        while True:
            while not self._frames:
                data = self.sock.recv(1 << 16)
                if not data:
                    return None
                self._frames = self._reader.feed(data)
            frame = self._frames.pop(0)
            if frame.kind not in (FrameKind.WINDOW, FrameKind.PRIMED, FrameKind.COPIED):
                return frame

    def expect(self, kind: FrameKind) -> Frame:
        frame = self.frame()
        assert frame is not None, f"ended, and had logged: {self.errors()}"
        assert FrameKind(frame.kind).name == kind.name, frame
        return frame

    def ready(self, **env: str) -> dict[str, Any]:
        self.send(FrameKind.ACTIVATE, 0, {"env": env})
        return self.expect(FrameKind.READY).json()

    def invoke(self, channel: int, event: Any = None, **head: Any) -> None:
        self.send(
            FrameKind.INVOKE,
            channel,
            {"id": f"i{channel}", "remaining_s": 100.0} | head,
            json.dumps(event).encode(),
        )

    def ask(self, channel: int, event: Any = None, **head: Any) -> Any:
        self.invoke(channel, event, **head)
        frame = self.expect(FrameKind.RESULT)
        assert frame.channel == channel
        return json.loads(frame.payload)

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def exit_code(self) -> int:
        return self.process.wait(LIMIT_S)

    def wait_for(self, name: str) -> None:
        """Block until the worker opens a pipe of its folder for writing."""
        with (self.folder / name).open("rb") as pipe:
            pipe.read()

    def release(self, name: str) -> None:
        (self.folder / name).open("wb").close()

    def close(self) -> None:
        self.sock.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
