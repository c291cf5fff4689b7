"""A receiver of webhooks that checks each signature by the rules of Standard Webhooks, and keeps what it received."""

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


class WebhookReceiver:
    """`completed[job]` has the webhook ids of the `job.completed` events that were received, and `said[job]` their contents."""

    def __init__(self, secret_file: Path) -> None:
        self.url = ""
        self.completed: defaultdict[str, set[str]] = defaultdict(set)
        self.said: defaultdict[str, set[str]] = defaultdict(set)
        self.forged: list[str] = []
        self._secret_file = secret_file

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        if not self._genuine(request, body):
            self.forged.append(f"{dict(request.headers)} {body[:200]!r}")
            return web.Response(status=400)
        event = json.loads(body)
        if event["type"] == "job.completed":
            job = event["data"]["id"]
            self.completed[job].add(request.headers["webhook-id"])
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
async def receiving(secret_file: Path) -> AsyncIterator[WebhookReceiver]:
    """Run a receiver on loopback in this process."""
    receiver = WebhookReceiver(secret_file)
    app = web.Application()
    app.router.add_post("/hook", receiver.take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    try:
        yield receiver
    finally:
        await runner.cleanup()
