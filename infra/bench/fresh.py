"""The comparison: the same handler started as a fresh process. Imports, builds, restores, serves; nothing is warm.

`python fresh.py CODE SNAPSHOT` prints a JSON line with its `url` once it listens. The weights are mapped as ours
are, so that the figure compares the way of starting and not the loader.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import uvloop
from aiohttp import web
from pilotflame.handlers.contract import Context
from pilotflame.handlers.resolve import resolve
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest
from pilotflame.snapshot.handle import Snapshot
from pilotflame.snapshot.named import Snapshots


async def serve(code: Path, root: Path) -> None:
    handler = resolve(code)
    # As at the deploy: if there is a manifest, none is made.
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
    uvloop.run(serve(Path(sys.argv[1]), Path(sys.argv[2])))
