"""A receiver of webhooks that checks each signature for itself, after Standard Webhooks, and remembers who sent what."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web


class Hooked:
    """`completed[job]` has the webhook id of each `job.completed` event received, repeated events included."""

    def __init__(self, secret_file: Path) -> None:
        self.url = ""
        self.completed: defaultdict[str, list[str]] = defaultdict(list)
        self.said: defaultdict[str, set[str]] = defaultdict(set)
        self.came = 0
        self.forged: list[str] = []
        self._secret_file = secret_file

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.came += 1
        if not self._genuine(request, body):
            self.forged.append(f"{dict(request.headers)} {body[:200]!r}")
            return web.Response(status=400)
        event = json.loads(body)
        if event["type"] == "job.completed":
            job = event["data"]["id"]
            self.completed[job].append(request.headers["webhook-id"])
            self.said[job].add(json.dumps([event["data"].get("status"), event["data"].get("output")]))
        return web.Response(status=204)

    def _genuine(self, request: web.Request, body: bytes) -> bool:
        master = base64.b64decode(self._secret_file.read_text().strip().removeprefix("whsec_"))
        # The event names its function, and must be signed with the key of that function.
        function = str(json.loads(body).get("function", ""))
        key = hmac.digest(master, function.encode(), hashlib.sha256)
        name, moment = (request.headers.get(f"webhook-{part}", "") for part in ("id", "timestamp"))
        digest = hmac.digest(key, f"{name}.{moment}.".encode() + body, hashlib.sha256)
        wanted = "v1," + base64.b64encode(digest).decode()
        return wanted in request.headers.get("webhook-signature", "").split()


@asynccontextmanager
async def receiving(secret_file: Path) -> AsyncIterator[Hooked]:
    """A receiver on loopback, in this process."""
    hooked = Hooked(secret_file)
    app = web.Application()
    app.router.add_post("/hook", hooked.take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    hooked.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    try:
        yield hooked
    finally:
        await runner.cleanup()
