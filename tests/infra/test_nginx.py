"""The blocks for nginx in the documentation, with a real nginx in front of gateways."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import httpx
import pytest
from live import Gateway, gateway_here, short_folder, until
from local_images import ROOT

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
ECHO = """
async def app(scope, receive, send):
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        return await send({"type": "websocket.send", "text": (await receive())["text"] + "!"})
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["client"][0].encode()})
"""

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not here: apt-get install nginx-light")


@contextlib.asynccontextmanager
async def proxied(gateway: Gateway, folder: Path) -> AsyncIterator[str]:
    """Run nginx with the block in docs/operations.md, and yield the path of its socket."""
    text = (ROOT / "docs/operations.md").read_text()
    map_block, location = re.findall(r"(?ms)^(map \S+ .*?\})[^\n]*\n(location / \{.*?^\})$", text)[0]
    served = location.replace("http://127.0.0.1:8600", gateway.url)
    assert served != location
    async with nginx(f"{map_block} server {{ listen unix:{folder}/nginx.sock; {served} }}", folder) as sock:
        yield sock


@contextlib.asynccontextmanager
async def nginx(block: str, folder: Path) -> AsyncIterator[str]:
    """Run nginx with this part of its settings, and yield the path of its socket."""
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr; events {{}}"
        f"http {{ {temporary} access_log off; {block} }}"
    )
    command = [str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
    with subprocess.Popen(command) as process:
        try:

            async def listens() -> bool:
                assert process.poll() is None
                return (folder / "nginx.sock").exists()

            await until(listens, "nginx")
            yield str(folder / "nginx.sock")
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait)


async def test_calls_and_websockets_pass(state: Path) -> None:
    folder = state.with_name("nginx")
    folder.mkdir()
    # Open the folders to all users, because the workers of an nginx that root has started run as another user.
    folder.parent.chmod(0o755)
    folder.chmod(0o777)
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(None, {"asgi": "app:app"}, files={"app.py": ECHO})
        path = f"http://127.0.0.1/asgi/{function.name}/"
        async with proxied(gateway, folder) as sock:
            async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=sock)) as client:
                assert (await client.get(path)).status_code == 200
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(sock)) as session,
                session.ws_connect(path) as socket,
            ):
                await socket.send_str("through")
                assert await socket.receive_str() == "through!"


async def test_a_caller_cannot_name_the_host_of_links(state: Path) -> None:
    folder = state.with_name("nginx")
    folder.mkdir()
    folder.parent.chmod(0o755)
    folder.chmod(0o777)
    forged = {"X-Forwarded-Host": "stranger.example", "Forwarded": "host=stranger.example;proto=https"}
    async with gateway_here(state, trusted_proxies=("127.0.0.1/32",)) as gateway:
        function = await gateway.deploy("def handler(event):\n    return event")
        order = {"version": function.name, "input": {}}
        direct = await gateway.client.post("/replicate/v1/predictions", json=order, headers=forged)
        assert "stranger.example" in direct.json()["urls"]["get"]
        async with (
            proxied(gateway, folder) as sock,
            httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=sock)) as client,
        ):
            behind = await client.post(
                "http://127.0.0.1/replicate/v1/predictions", json=order, headers=forged
            )
            assert behind.json()["urls"]["get"].startswith("http://127.0.0.1/")


async def test_several_gateways_share_the_calls(postgres_url: str) -> None:
    with short_folder() as folder:
        folder.chmod(0o755)
        proxy = folder / "nginx"
        proxy.mkdir(mode=0o777)
        proxy.chmod(0o777)
        async with (
            gateway_here(folder / "one" / "state", database=postgres_url) as one,
            gateway_here(folder / "two" / "state", database=postgres_url) as two,
        ):
            source = (
                "import pathlib\ndef handler(event):\n    return pathlib.Path(__file__).parents[5].name\n"
            )
            function = await one.deploy(source)
            text = (ROOT / "docs/how-to/several-gateways.md").read_text()
            (block,) = re.findall(r"(?s)```nginx\n(.*?)```", text)
            for number, gateway in enumerate((one, two), 1):
                block = block.replace(f"gateway-{number}:8600", gateway.url.removeprefix("http://"))
            block = re.sub(r"listen 443 ssl;|ssl_\w+ .*?;", "", block).replace(
                "server {", f"server {{ listen unix:{proxy}/nginx.sock;"
            )
            async with (
                nginx(block, proxy) as sock,
                httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=sock)) as client,
            ):
                answers = [await client.post(f"http://127.0.0.1{function.path}", json=1) for _ in range(4)]
            assert sorted(answer.json() for answer in answers) == ["one", "one", "two", "two"]
