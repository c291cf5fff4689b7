"""A model registry for tests, over real sockets: the REST interface of MLflow for models, aliases and artifacts.

`test_mlflow` runs the same tests against a real server, if there is one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import httpx

API, ARTIFACTS = "/api/2.0/mlflow", "/api/2.0/mlflow-artifacts/artifacts"
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class Models:
    """A running server. Its methods call the REST interface, so they work with a real server too."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._runs: dict[str, str] = {}
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=30)

    def upload(self, files: Mapping[str, bytes]) -> str:
        """Store artifacts of a new run. Return the location of their folder."""
        made = self._client.post(f"{API}/runs/create", json={"experiment_id": "0"})
        assert made.is_success, made.text
        run = made.json()["run"]["info"]
        location = f"{run['artifact_uri']}/net"
        self._runs[location] = run["run_id"]
        for name, data in files.items():
            path = quote(f"{location.removeprefix('mlflow-artifacts:/')}/{name}")
            sent = self._client.put(f"{ARTIFACTS}/{path}", content=data)
            assert sent.is_success, sent.text
        return location

    def add(self, model: str, location: str, alias: str = "") -> str:
        """Register a version whose files are at `location`. Return its number."""
        run = {"run_id": self._runs[location]} if location in self._runs else {}
        self._client.post(f"{API}/registered-models/create", json={"name": model})
        made = self._client.post(
            f"{API}/model-versions/create", json={"name": model, "source": location, **run}
        )
        assert made.is_success, made.text
        version = str(made.json()["model_version"]["version"])
        if alias:
            pointer = {"name": model, "alias": alias, "version": version}
            assert self._client.post(f"{API}/registered-models/alias", json=pointer).is_success
        return version

    def ask(self, path: str, /, **query: str) -> tuple[int, Any]:
        answer = self._client.get(path, params=query)
        return answer.status_code, answer.json()

    def close(self) -> None:
        self._client.close()


class _Double(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    models: dict[str, list[str]]
    aliases: dict[tuple[str, str], str]
    files: dict[str, bytes]
    login: str | None
    asked: list[str | None]

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/runs/create"):
            run = uuid.uuid4().hex
            uri = f"mlflow-artifacts:/0/{run}/artifacts"
            return self._send(200, {"run": {"info": {"run_id": run, "artifact_uri": uri}}})
        name = body["name"]
        if self.path.endswith("/registered-models/create"):
            self.models.setdefault(name, [])
            return self._send(200, {"registered_model": {"name": name}})
        if self.path.endswith("/model-versions/create"):
            self.models[name].append(body["source"])
            return self._send(200, {"model_version": self._version(name, str(len(self.models[name])))})
        self.aliases[name, body["alias"]] = body["version"]
        return self._send(200, {})

    def do_PUT(self) -> None:
        path = unquote(urlsplit(self.path).path).removeprefix(f"{ARTIFACTS}/")
        self.files[path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._send(200, {})

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path, query = unquote(parts.path), {name: value[0] for name, value in parse_qs(parts.query).items()}
        self.asked.append(self.headers.get("Authorization"))
        if self.login is not None and self.headers.get("Authorization") != self.login:
            return self._send(401, {"error_code": "UNAUTHENTICATED", "message": "Log in."})
        if path == ARTIFACTS:
            return self._list(query.get("path", ""))
        if path.startswith(f"{ARTIFACTS}/"):
            return self._file(path.removeprefix(f"{ARTIFACTS}/"))
        if path == f"{API}/registered-models/alias":
            version = self.aliases.get((query["name"], query["alias"]))
            if version is None:
                message = f"Registered model alias {query['alias']} not found."
                return self._send(400, {"error_code": "INVALID_PARAMETER_VALUE", "message": message})
            return self._send(200, {"model_version": self._version(query["name"], version)})
        number = int(query["version"]) - 1
        if not 0 <= number < len(self.models.get(query["name"], [])):
            message = f"Model Version (name={query['name']}, version={query['version']}) not found"
            return self._send(404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": message})
        return self._send(200, {"artifact_uri": self.models[query["name"]][number]})

    def _version(self, name: str, version: str) -> dict[str, str]:
        source = self.models[name][int(version) - 1]
        return {"name": name, "version": version, "status": "READY", "source": source}

    def _list(self, folder: str) -> None:
        found: dict[str, dict[str, Any]] = {}
        for path, data in self.files.items():
            if path.startswith(f"{folder}/"):
                first, _, rest = path.removeprefix(f"{folder}/").partition("/")
                size = {} if rest else {"file_size": len(data)}
                found[first] = {"path": first, "is_dir": bool(rest), **size}
        self._send(200, {"files": [found[name] for name in sorted(found)]} if found else {})

    def _file(self, path: str) -> None:
        if (data := self.files.get(path)) is None:
            message = f"No such artifact: '{path}'"
            return self._send(404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": message})
        headers = {
            "ETag": f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        if found := _RANGE.fullmatch(self.headers.get("Range", "")):
            begin, end = int(found[1]), min(int(found[2]) + 1, len(data))
            if begin >= len(data):
                return self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
            return self._send(206, data[begin:end], headers)
        return self._send(200, data, headers)

    def _send(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def mlflow_double(user: str = "", password: str = "") -> Iterator[tuple[Models, list[str | None]]]:
    """Run a double of the server. Yield it, and the Authorization headers of the requests that read."""
    asked: list[str | None] = []
    login = f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}" if user else None
    state: dict[str, Any] = {"models": {}, "aliases": {}, "files": {}, "login": login, "asked": asked}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Double,), state))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    models = Models(f"http://127.0.0.1:{server.server_address[1]}")
    try:
        yield models, asked
    finally:
        models.close()
        server.shutdown()
        server.server_close()
