"""A registry for tests: Debian's docker-registry on loopback, and what clients push to it.

With `login="basic"`, it wants a user and a password. With `login="token"`, it wants tokens of a token server of the
tests, which signs them as the distribution specification says.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import trustme
from joserfc import jwt
from joserfc.jwk import RSAKey

USER, PASSWORD = "ann", "hush-of-registry"
# The bcrypt hash of the password, as `htpasswd -B` writes it.
_HASHED = "$2b$05$abcdefghijklmnopqrstuulPvUN1tWIj0QbWhuZHiAE6AHE9CHnr2"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
MODEL_TYPE = "application/vnd.cncf.model.manifest.v1+json"
WEIGHT_TYPE = "application/vnd.cncf.model.weight.v1"
CONFIG_TYPE = "application/vnd.cncf.model.weight.config.v1"
FILEPATH = "org.cncf.model.filepath"
TITLE = "org.opencontainers.image.title"


def auth_file(registry: str, user: str = USER, password: str = PASSWORD) -> str:
    """Return the text of an auth file with one login."""
    pair = base64.b64encode(f"{user}:{password}".encode()).decode()
    return json.dumps({"auths": {registry: {"auth": pair}}})


def tar_of(files: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Registry:
    """A running registry. `host` is its name in references."""

    def __init__(self, host: str, root: Path, tokens: TokenServer | None, *, closed: bool) -> None:
        self.host, self.tokens = host, tokens
        self._root = root
        auth = (USER, PASSWORD) if closed and tokens is None else None
        self._client = httpx.Client(base_url=f"http://{host}", auth=auth, trust_env=False, timeout=30)

    def push(self, reference: str, layers: list[dict[str, Any]], **manifest: Any) -> str:
        """Push a manifest with these layers, which `layer` makes, as `repository:tag`. Return its digest."""
        repository, _, tag = reference.partition(":")
        config = self.layer(repository, b"{}", "application/vnd.cncf.model.config.v1+json")
        body = {
            "schemaVersion": 2, "mediaType": MANIFEST_TYPE, "artifactType": MODEL_TYPE, "config": config,
            "layers": layers, **manifest,
        }  # fmt: skip
        text = json.dumps(body).encode()
        self._put(repository, f"manifests/{tag}", text, body["mediaType"])
        return digest(text)

    def layer(
        self, repository: str, data: bytes, media_type: str, name: str = "", by: str = FILEPATH
    ) -> dict[str, Any]:
        """Push a blob. Return its descriptor, with its file's name in the annotation `by`."""
        sent = self._client.post(f"/v2/{repository}/blobs/uploads/", headers=self._sign(repository))
        assert sent.status_code == 202, sent.text
        where = httpx.URL(sent.headers["location"]).copy_merge_params({"digest": digest(data)})
        done = self._client.put(where, content=data, headers=self._sign(repository))
        assert done.status_code == 201, done.text
        annotations = {"annotations": {by: name}} if name else {}
        return {"mediaType": media_type, "digest": digest(data), "size": len(data), **annotations}

    def damage(self, data: bytes, at: int) -> None:
        """Change one byte of a stored blob, behind the registry's back."""
        digits = hashlib.sha256(data).hexdigest()
        path = self._root / "docker/registry/v2/blobs/sha256" / digits[:2] / digits / "data"
        with path.open("r+b") as stream:
            stream.seek(at)
            stream.write(bytes([data[at] ^ 1]))

    def close(self) -> None:
        self._client.close()

    def _put(self, repository: str, path: str, data: bytes, media_type: str) -> None:
        headers = {"Content-Type": media_type, **self._sign(repository)}
        done = self._client.put(f"/v2/{repository}/{path}", content=data, headers=headers)
        assert done.status_code == 201, done.text

    def _sign(self, repository: str) -> dict[str, str]:
        if self.tokens is None:
            return {}
        return {"Authorization": f"Bearer {self.tokens.sign(repository, ['pull', 'push'])}"}


class TokenServer:
    """Gives tokens to clients with the login. Keeps the queries and the Authorization headers of their
    requests.
    """

    def __init__(self, folder: Path) -> None:
        issuer = trustme.CA(key_type=trustme.KeyType.RSA)
        self._key = RSAKey.import_key(issuer.private_key_pem.bytes())
        self._certificate = issuer.cert_pem.bytes()
        (folder / "issuer.pem").write_bytes(self._certificate)
        self.asked: list[tuple[dict[str, list[str]], str | None]] = []
        self.lives_s = 300
        self.public = False
        """True if the server also gives tokens for requests without a login."""
        self.gives = {"pull", "push"}
        """The actions that the server allows to the user."""
        handler = type("Handler", (_TokenHandler,), {"tokens": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.realm = f"http://127.0.0.1:{self._server.server_address[1]}/token"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def sign(self, repository: str, actions: list[str]) -> str:
        text = "".join(self._certificate.decode().split("-----")[2].split())
        now_s = int(time.time())
        claims = {
            "iss": "tests", "sub": USER, "aud": "registry", "iat": now_s, "nbf": now_s - 60,
            "exp": now_s + self.lives_s, "jti": uuid.uuid4().hex,
            "access": [{"type": "repository", "name": repository, "actions": actions}],
        }  # fmt: skip
        return jwt.encode({"alg": "RS256", "typ": "JWT", "x5c": [text]}, claims, self._key)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _TokenHandler(BaseHTTPRequestHandler):
    tokens: TokenServer

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        query, login = parse_qs(urlsplit(self.path).query), self.headers.get("Authorization")
        self.tokens.asked.append((query, login))
        right = f"Basic {base64.b64encode(f'{USER}:{PASSWORD}'.encode()).decode()}"
        allowed = login == right or (self.tokens.public and login is None)
        _, repository, wanted = query["scope"][0].split(":")
        actions = sorted(self.tokens.gives & set(wanted.split(",")))
        answer = {"token": self.tokens.sign(repository, actions) if allowed else ""}
        text = json.dumps(answer).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def registry(folder: Path, login: str = "") -> Iterator[Registry]:
    """Run a registry below `folder` until the block ends. Skip the test if there is no docker-registry."""
    if shutil.which("docker-registry") is None:
        pytest.skip(
            "docker-registry is not installed: apt-get install --no-install-recommends docker-registry"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokens = TokenServer(folder) if login == "token" else None
    auth: dict[str, Any] = {}
    if login == "basic":
        (folder / "users").write_text(f"{USER}:{_HASHED}\n")
        auth = {"auth": {"htpasswd": {"realm": "tests", "path": str(folder / "users")}}}
    elif tokens is not None:
        issuer = {"issuer": "tests", "rootcertbundle": str(folder / "issuer.pem")}
        auth = {"auth": {"token": {"realm": tokens.realm, "service": "registry", **issuer}}}
    settings = {
        "version": 0.1, "log": {"level": "info", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}}, "http": {"addr": "127.0.0.1:0"}, **auth,
    }  # fmt: skip
    # JSON is YAML, but the registry accepts a version only without quotation marks.
    (folder / "settings.yml").write_text(json.dumps(settings))
    process = subprocess.Popen(
        ["docker-registry", "serve", str(folder / "settings.yml")],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    reader: threading.Thread | None = None
    assert process.stderr is not None
    try:
        lines = iter(process.stderr.readline, "")
        found = next(
            filter(None, (re.search(r"listening on (127\.0\.0\.1:\d+)", line) for line in lines)), None
        )
        assert found is not None, "docker-registry ended"
        # Read stderr until the end, since a full pipe would block the registry.
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        running = Registry(found[1], folder / "data", tokens, closed=bool(login))
        try:
            yield running
        finally:
            running.close()
    finally:
        process.kill()
        process.wait()
        if reader is not None:
            reader.join()
        process.stderr.close()
        if tokens is not None:
            tokens.close()
