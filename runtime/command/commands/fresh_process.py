"""Runs a handler in a fresh process. The demo and the benchmarks compare its first answer with a cold start.

`python -m pilotflame.runtime.command.commands.fresh_process CODE SNAPSHOT` imports and builds the handler, and maps the weights
as a worker does. Once it listens, it prints a JSON line with its `url`. `first_answer` starts such a process and times
it.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ....handlers.contract import Context
from ....handlers.resolve import resolve
from ....snapshot.format.create import create
from ....snapshot.format.manifest import MANIFEST_NAME, Manifest
from ....snapshot.handle import Snapshot
from ....snapshot.named import Snapshots

TIMEOUT_S = 300.0


def first_answer(code: Path, snapshot: Path, event: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Start a fresh process. Return its first answer over HTTP, and the milliseconds from its start to the answer."""
    command = [sys.executable, "-m", __name__, str(code), str(snapshot)]
    started_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            parts = urlsplit(json.loads(process.stdout.readline() if process.stdout else "")["url"])
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
            connection.request("POST", "/invoke", json.dumps(event), {"Content-Type": "application/json"})
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            ms = (time.perf_counter() - started_s) * 1e3
            connection.close()
        finally:
            process.kill()
    return answer, ms


async def serve(code: Path, root: Path) -> None:
    """Load the handler in `code` with the weights in `root`, and answer `POST /invoke` until the process is killed."""
    # Imported here because only the fresh process serves.
    from aiohttp import web  # noqa: PLC0415

    os.chdir(code)
    handler = resolve(code)
    # As in a deploy, make a manifest only if the snapshot has no manifest yet.
    known = (root / MANIFEST_NAME).is_file()
    snapshot = Snapshot(root, Manifest.read(root) if known else create(root))
    snapshots = Snapshots([snapshot])
    context = Context("fresh", "r0", snapshots=snapshots)
    state = handler.build(context) if handler.build else None
    snapshot.open()
    batch = Context("fresh", "r0", snapshots=snapshots, state=state)

    async def invoke(request: web.Request) -> web.Response:
        event = handler.input.decode(await request.read())
        answer = handler.call([event] if handler.batch else event, batch)
        payload, kind = handler.output.encode(answer[0] if handler.batch else answer)
        return web.Response(body=payload, content_type=kind)

    app = web.Application()
    app.router.add_post("/invoke", invoke)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    sys.stdout.write(json.dumps({"url": f"http://{host}:{port}"}) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(Path(sys.argv[1]), Path(sys.argv[2])))
