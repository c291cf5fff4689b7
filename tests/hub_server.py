"""A hub for tests, over real sockets: the interface of huggingface.co for models, and its content delivery network.

Large files are redirected to another server with a signed URL, small ones to another path; tokens, gated and private
repositories, branches and commits, and errors are as on the hub. The real client is a test of it.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

LARGE_BYTES = 1000
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass
class Repository:
    """Files by commit, and commits by branch. `readers` are the tokens that open it; None if it is public."""

    commits: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    readers: set[str] | None = None
    gated: bool = False
    """The description of a gated repository is public, its files are not."""

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        text = repr((sorted(files.items()), len(self.commits))).encode()
        sha = hashlib.sha1(text, usedforsecurity=False).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha


@dataclass
class Asked:
    """One request."""

    server: str
    method: str
    target: str
    headers: Mapping[str, str]
    status: int = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.asked = Asked(self.server.role, self.command, self.path, headers)  # type: ignore[attr-defined]
        self.hub.asked.append(self.asked)
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        if self.asked.server == "cdn":
            return self._deliver(path, parse_qs(parts.query))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self._describe(found[1], found[2] or "main")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            return self._list(found[1], found[2])
        if found := re.fullmatch(r"/api/resolve-cache/models/([^/]+/[^/]+)/([^/]+)/(.+)", path):
            return self._file(found[1], found[2], found[3], cached=True)
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(refs/[^/]+/[^/]+|[^/]+)/(.+)", path):
            return self._file(found[1], found[2], found[3], cached=False)
        return self._fail(404, "", "Not found")

    def _opened(self, name: str, *, files: bool) -> Repository | None:
        """Return the repository if the token opens it, or answer with the hub's error."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            return self._fail(401, "", "Invalid credentials in Authorization header")
        repository = self.hub.repositories.get(name)
        if repository is None or (
            repository.readers is not None and not repository.gated and token not in repository.readers
        ):
            status = 404 if token else 401
            return self._fail(status, "RepoNotFound", "Repository not found")
        if files and repository.gated and token not in (repository.readers or ()):
            why = f"Access to model {name} is restricted"
            return self._fail(403 if token else 401, "GatedRepo", why)
        return repository

    def _describe(self, name: str, revision: str) -> None:
        if (repository := self._opened(name, files=False)) is None:
            return None
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            return self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = [{"rfilename": name} for name in sorted(repository.commits[commit])]
        answer = {
            "_id": "1", "id": name, "modelId": name, "sha": commit, "siblings": files, "private": False,
            "gated": "auto" if repository.gated else False, "disabled": False, "downloads": 0, "likes": 0, "tags": [],
        }  # fmt: skip
        return self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _list(self, name: str, revision: str) -> None:
        if (repository := self._opened(name, files=False)) is None:
            return None
        found = []
        for path, data in sorted(repository.commits[repository.branches.get(revision, revision)].items()):
            digest = hashlib.sha256(data).hexdigest()
            large = {"lfs": {"oid": digest, "size": len(data), "pointerSize": 135}}
            about = {"type": "file", "path": path, "size": len(data), "oid": digest[:40]}
            found.append({**about, **(large if len(data) >= LARGE_BYTES else {})})
        return self._send(200, {"Content-Type": "application/json"}, json.dumps(found).encode())

    def _file(self, name: str, revision: str, path: str, *, cached: bool) -> None:
        if (repository := self._opened(name, files=True)) is None:
            return None
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            return self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        said = {"X-Repo-Commit": commit}
        data = repository.commits[commit].get(path)
        if data is None:
            return self._fail(404, "EntryNotFound", "Entry not found", said)
        digest = hashlib.sha256(data).hexdigest()
        if len(data) >= LARGE_BYTES:
            said |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{digest}"'}
            return self._send(302, {**said, "Location": self.hub.signed(digest)}, b"Found")
        if not cached:
            where = f"/api/resolve-cache/models/{name}/{commit}/{quote(path)}?etag=%22{digest[:8]}%22"
            return self._send(307, {**said, "ETag": f'"{digest}"', "Location": where}, b"Temporary Redirect")
        return self._range(data, {**said, "ETag": f'"{digest}"', "Content-Type": "text/plain"})

    def _deliver(self, path: str, query: dict[str, list[str]]) -> None:
        digest = path.rpartition("/")[2]
        if query.get("Signature", [""])[0] != self.hub.signature(digest):
            return self._send(
                403, {"Content-Type": "application/xml"}, b"<Error><Code>AccessDenied</Code></Error>"
            )
        for repository in self.hub.repositories.values():
            for files in repository.commits.values():
                for data in files.values():
                    if hashlib.sha256(data).hexdigest() == digest:
                        return self._range(data, {"ETag": f'"{digest[:32]}"'})
        return self._send(404, {}, b"")

    def _range(self, data: bytes, headers: Mapping[str, str]) -> None:
        status, body = 200, data
        if found := _RANGE.fullmatch(self.headers.get("Range", "")):
            begin, end = int(found[1]), int(found[2]) + 1 if found[2] else len(data)
            if begin >= len(data):
                return self._send(416, {"Content-Range": f"bytes */{len(data)}"}, b"")
            status, body = 206, data[begin:end]
            headers = {**headers, "Content-Range": f"bytes {begin}-{begin + len(body) - 1}/{len(data)}"}
        return self._send(status, {**headers, "Accept-Ranges": "bytes"}, body)

    def _fail(self, status: int, code: str, message: str, more: Mapping[str, str] | None = None) -> None:
        said = {"X-Error-Code": code} if code else {}
        text = json.dumps({"error": message}).encode()
        self._send(status, {**said, "X-Error-Message": message, **(more or {})}, text)

    def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.asked.status = status
        self.send_response(status)
        said = {**headers, "Content-Length": str(len(body))}
        if self.hub.terse and status in {200, 206}:
            del said["Content-Length"]
            said = {**said, "Content-Range": "", "Transfer-Encoding": "chunked"}
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        for name, value in said.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class HubServer:
    """The hub and its network, on two ports of 127.0.0.1: `with HubServer() as hub`."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.tokens: set[str] = set()
        self.asked: list[Asked] = []
        self.terse = False
        """If True, answers have neither a length nor a Content-Range, like those of some mirrors."""
        self._signed = 0
        self._servers = {role: self._server(role) for role in ("hub", "cdn")}
        self.endpoint = self._url("hub")

    def add(self, name: str, files: Mapping[str, bytes], **how: Any) -> Repository:
        repository = self.repositories[name] = Repository(**how)
        self.tokens |= repository.readers or set()
        repository.commit(files)
        return repository

    def expire(self) -> None:
        """From now on, the network refuses all URLs that were signed before."""
        self._signed += 1

    def signature(self, digest: str) -> str:
        return hashlib.sha256(f"{self._signed}/{digest}".encode()).hexdigest()

    def signed(self, digest: str) -> str:
        return f"{self._url('cdn')}/repos/{digest}?Expires=1&Signature={self.signature(digest)}"

    def _url(self, role: str) -> str:
        return f"http://127.0.0.1:{self._servers[role].server_address[1]}"

    def _server(self, role: str) -> ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"hub": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        # Clients may close their connections at any time.
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        server.role = role  # type: ignore[attr-defined]
        return server

    def __enter__(self) -> HubServer:
        for server in self._servers.values():
            # Look for the end every 20 ms. By default, `shutdown` takes up to half a second.
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.shutdown()
            server.server_close()
