"""The attacks of `make attack` that are cheap for their sender: what a gateway refuses, parses, counts, keeps and shows."""

from __future__ import annotations

import contextlib
import functools
import gzip
import http.client
import io
import itertools
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import brotli
import grpc
from attack_stage import Breach, Stage, attack, code
from attacks import failing, kept_after_failures
from grpc_frames import connection, unfinished_call
from hostile import callers
from live import free_port
from pilotflame.runtime.plugins.oip.grpc_messages import message

MB = 10**6
PATHS = ("/invoke/hello", "/v1/functions", "/v2/hello/run", "/openai/v1/chat/completions", "/nothing")
FUNCTIONS, IDLE = 100, 900
FORWARDED = 300
"""The number of connections of gRPC. Each of them takes three descriptors."""
Send = Callable[[], int]
GRPC = {"plugin_ports": [f"oip=127.0.0.1:{free_port()}"]}
_, _, GRPC_ADDRESS = GRPC["plugin_ports"][0].partition("=")
NOT_CALLED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNAVAILABLE,
}


def repeat(stage: Stage, sends: Iterator[Send], senders: int = 3, times: int = 1) -> str:
    """Send in `senders` threads for `times` times the seconds of the stage.

    Return how often each status was answered. The status 0 stands for a lost connection.
    """
    stage.until_s = time.monotonic() + times * stage.seconds
    found = Counter[int]()

    def send(_: int) -> None:
        while stage.on:
            found[next(sends)()] += 1

    with callers.senders(senders) as pool:
        list(pool.map(send, range(senders)))
    if errors := sum(count for status, count in found.items() if status >= 500 and status not in {503, 504}):
        raise Breach(f"{errors} requests were answered with an error of the gateway: {dict(found)}")
    return f"answers: {dict(found)}"


def raw(stage: Stage, method: str, path: str, body: bytes, headers: Mapping[str, str], key: str = "") -> Send:
    """Return a function that sends a request, and returns the status."""
    known = {"Authorization": f"Bearer {stage.keys[key]}"} if key else {}

    def send() -> int:
        with contextlib.closing(
            http.client.HTTPConnection(urlsplit(stage.server.url).netloc, timeout=60)
        ) as connection:
            try:
                connection.request(method, path, body, {**headers, **known})
                return connection.getresponse().status
            except (OSError, http.client.HTTPException):
                return 0

    return send


def zeros(coding: str, size: int) -> bytes:
    """Return `size` zeros, compressed."""
    if coding == "gzip":
        return gzip.compress(bytes(size), 9)
    compressor = brotli.Compressor(lgwin=24)
    pieces = [compressor.process(bytes(16 * MB)) for _ in range(size // (16 * MB))]
    return b"".join([*pieces, compressor.finish()])


@attack("bodies that unpack to 1 GB, without a key")
def unpacking(stage: Stage) -> str:
    bombs = {"gzip": zeros("gzip", 1000 * MB), "br": zeros("br", 1000 * MB)}
    sends = [
        raw(stage, "POST", path, body, {"Content-Encoding": coding})
        for path in PATHS
        for coding, body in bombs.items()
    ]
    return repeat(stage, itertools.cycle(sends))


@attack("bodies that do not end, in large chunks and in chunks of one byte, without a key")
def endless(stage: Stage) -> str:
    address, pieces = (
        urlsplit(stage.server.url),
        itertools.cycle((b"10000\r\n" + bytes(1 << 16) + b"\r\n", b"1\r\nx\r\n" * 10_000)),
    )

    def send(path: str) -> int:
        piece = next(pieces)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        with socket.create_connection((address.hostname or "", address.port or 80), timeout=10) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(head)
                while stage.on:
                    sock.sendall(piece)
            with contextlib.suppress(OSError):
                return int(sock.recv(4096).split()[1])
            return 0

    return repeat(stage, (functools.partial(send, path) for path in itertools.cycle(PATHS)))


@attack("1.5 million lines of code, 1 MB of TOML, nested aliases of YAML, in containers")
def sources(stage: Stage) -> str:
    echo, lines = code("echo"), "x=1\n" * 1_500_000
    aliases = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    hostile = [
        {"handler.py": lines + echo},
        {"handler.py": f"x = {'(' * 5000}{')' * 5000}\n" + echo},
        {
            "handler.py": echo,
            "pilotflame.toml": "".join(f"[a.{'b.' * 50}k{n}]\nx = 1\n" for n in range(9000)),
        },
        {"cog.yaml": aliases, "predict.py": echo},
        {"handler.py": echo, ".pilotflameignore": "**/*a" * 2000},
        {"handler.py": echo, "requirements.txt": "a\n" * 500_000},
    ]

    def send(members: Mapping[str, str]) -> int:
        return stage.deploy(members, {})[0]

    return repeat(
        stage, (functools.partial(send, one) for one in itertools.cycle(hostile)), senders=2, times=3
    )


def values() -> Iterator[bytes]:
    """Yield bodies whose values are expensive to parse or to validate."""
    yield b'{"items": [' + b",".join([b'"x"'] * 4_000_000) + b"]}"
    yield b'{"items": [' + b",".join([b"[]"] * 6_000_000) + b"]}"
    yield b'{"items": [' + b",".join([b'{"a":"b"}'] * 1_500_000) + b"]}"
    yield b"[" * 5_000_000
    yield b'{"items": [' + b"9" * 5_000_000 + b"]}"
    yield b'{"items": ["' + b"9" * 18_000_000 + b'"]}'
    yield b'{"items": ["' + b'\\"' * 9_000_000 + b'"]}'
    yield b" " * 18_000_000 + b"1"
    yield b'{"items": [' + b",".join([b"0.1234567890123456789"] * 800_000) + b"]}"
    yield b"{" + b",".join(b'"%d":1' % n for n in range(1_000_000)) + b"}"


@attack("18 MB of JSON: wrong items, empty lists, members, nesting, digits, blanks", handler="typed")
def json_values(stage: Stage) -> str:
    kind = {"Content-Type": "application/json"}
    wrapped = [
        *(("/invoke/evil", body) for body in values()),
        *(("/v2/evil/run", b'{"input": ' + body + b"}") for body in values()),
        *(
            ("/openai/v1/chat/completions", b'{"model": "evil", "messages": ' + body + b"}")
            for body in values()
        ),
        *(("/v1/keys", body) for body in values()),
    ]
    sends = [raw(stage, "POST", path, body, kind, "caller") for path, body in wrapped]
    return repeat(stage, itertools.cycle(sends), senders=2, times=3)


@attack("forms of 40,000 parts, and archives with headers of 8 MB and 30,000 members")
def parts(stage: Stage) -> str:
    form = (
        b"".join(b'--b\r\nContent-Disposition: form-data; name="f"\r\n\r\nx\r\n' for _ in range(40_000))
        + b"--b--\r\n"
    )
    near = (
        b'--b\r\nContent-Disposition: form-data; name="f"\r\n\r\n' + b"\r\n--a" * 3_000_000 + b"\r\n--b--\r\n"
    )
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    archives = [
        archive({"comment": "x" * 8_000_000}, 1),
        archive({f"k{n}": "v" for n in range(200_000)}, 1),
        archive({}, 30_000),
    ]
    sends = [
        *(
            raw(stage, "POST", path, body, kind, "caller")
            for path in ("/v1/files", "/invoke/evil")
            for body in (form, near)
        ),
        *(
            raw(
                stage,
                "POST",
                "/v1/functions?set=name=evil&install=1",
                body,
                {"Content-Type": "application/gzip"},
                "deployer",
            )
            for body in archives
        ),
    ]
    return repeat(stage, itertools.cycle(sends), senders=2, times=2)


def archive(headers: Mapping[str, str], members: int) -> bytes:
    """Return a tar.gz whose members have these PAX headers."""
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        for number in range(members):
            member = tarfile.TarInfo(f"{number}.py")
            member.pax_headers = dict(headers)
            tar.addfile(member, io.BytesIO())
    return found.getvalue()


@attack(
    "WebSockets: messages in pieces of one byte, and messages that an app does not read",
    handler="sockets",
    settings={"asgi": "handler:app"},
)
def web_sockets(stage: Stage) -> str:
    begin, piece, whole = (bytes((kind, 0x81, 0, 0, 0, 0)) + b"x" for kind in (0x01, 0x00, 0x81))
    sends = [
        functools.partial(web_socket, stage, path, first, repeated * 4096)
        for path in ("/asgi/evil/", "/asgi/evil/deaf")
        for first, repeated in ((begin, piece), (b"", whole))
    ]
    return repeat(stage, itertools.cycle(sends), senders=4)


def web_socket(stage: Stage, path: str, first: bytes, repeated: bytes) -> int:
    """Open a WebSocket, and send frames until it is closed. Return the status of the handshake."""
    address = urlsplit(stage.server.url)
    head = (
        f"GET {path} HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
        f"Authorization: Bearer {stage.keys['caller']}\r\n\r\n"
    )
    with socket.create_connection((address.hostname or "", address.port or 80), timeout=5) as sock:
        try:
            sock.sendall(head.encode())
            status = int(sock.recv(4096).split()[1])
            sock.sendall(first)
            while status == 101 and stage.on:
                sock.sendall(repeated)
        except OSError:
            return 0
    return status


@attack(
    "1,000 failed calls of 1 MB, and 90 of 19 MB, of a web app",
    handler="sockets",
    settings={"asgi": "handler:app"},
)
def app_failures(stage: Stage) -> str:
    return kept_after_failures(stage, failing(stage, ("/asgi/evil/",)))


@attack(f"metrics and the list of {FUNCTIONS} functions, again and again", functions=FUNCTIONS)
def answers_of_many(stage: Stage) -> str:
    sends = [
        raw(stage, "GET", path, b"", {}, "admin") for path in ("/metrics", "/v1/functions", "/v1/console")
    ]
    return repeat(stage, itertools.cycle(sends))


@attack(f"{IDLE:,} idle connections, and half of a request on each second one")
def idle(stage: Stage) -> str:
    address = urlsplit(stage.server.url)
    refused = 0
    with contextlib.ExitStack() as held:
        for number in range(IDLE):
            try:
                sock = held.enter_context(
                    socket.create_connection((address.hostname or "", address.port or 80), timeout=5)
                )
                sock.sendall(b"POST /invoke/hello HTTP/1.1\r\nHost:" if number % 2 else b"")
            except OSError:
                refused += 1
        while stage.on:
            time.sleep(0.1)
    return f"{refused} connections refused"


@attack("gRPC: messages that unpack to 200 MB, and 10 million empty tensors", handler="echo", gateway=GRPC)
def grpc_messages(stage: Stage) -> str:
    bearer = (("authorization", f"Bearer {stage.keys['caller']}"),)
    method = "/inference.GRPCInferenceService/ModelInfer"
    empty = b"\x2a\0" * 10_000_000
    messages = [(bytes(200 * MB), grpc.Compression.Gzip), (empty, None), (b"\x78\0" * 10_000_000, None)]
    with grpc.insecure_channel(GRPC_ADDRESS) as channel:

        def send(message: bytes, coding: grpc.Compression | None) -> int:
            call: Any = channel.unary_unary(method)
            try:
                call(message, metadata=bearer, compression=coding, timeout=60)
            except grpc.RpcError as error:
                return 500 if error.code() is grpc.StatusCode.INTERNAL else 400
            return 200

        sends = [functools.partial(send, *one) for one in messages]
        return repeat(stage, itertools.cycle(sends), senders=2, times=2)


@attack("1,000 failed calls of 1 MB, and 90 of 19 MB, of gRPC", gateway=GRPC)
def grpc_failures(stage: Stage) -> str:
    """Raise Breach if the gateway keeps the inputs of these calls. The containers have no numpy, so evil is a
    process.
    """
    (stage.root / "evil").mkdir()
    (stage.root / "evil" / "handler.py").write_text(code("fails_typed"))
    evil = {"path": str(stage.root / "evil"), "overrides": {"name": "evil"}}
    stage.ask("POST", "/v1/functions", evil, key="admin")
    bearer = (("authorization", f"Bearer {stage.keys['caller']}"),)

    def fail(size: int, count: int) -> set[int]:
        tensor = {"name": "x", "datatype": "BYTES", "shape": [1]}
        text = size.to_bytes(4, "little") + bytes(size)
        sent = message("ModelInferRequest", model_name="evil", inputs=[tensor], raw_input_contents=[text])
        with grpc.insecure_channel(GRPC_ADDRESS) as channel, callers.senders(8) as pool:
            call: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            ended = [
                pool.submit(call, sent.SerializeToString(), metadata=bearer, timeout=60) for _ in range(count)
            ]
            codes = {one.exception().code() for one in ended}  # type: ignore[union-attr]
        return {400 if code in NOT_CALLED else 500 for code in codes}

    return kept_after_failures(stage, {"gRPC": fail})


@attack(
    f"gRPC: {FORWARDED} connections, each with a message of 20 MB that does not end",
    handler="echo",
    gateway=GRPC,
)
def grpc_connections(stage: Stage) -> str:
    host, _, port = GRPC_ADDRESS.partition(":")
    metadata = [("authorization", f"Bearer {stage.keys['caller']}")]
    begun = connection() + unfinished_call("ModelStreamInfer", metadata, 20 * MB, 4_000_000)
    refused = 0
    with contextlib.ExitStack() as held:
        for _ in range(FORWARDED):
            try:
                sock = held.enter_context(socket.create_connection((host, int(port)), timeout=5))
                sock.setblocking(False)
                sock.send(begun)
            except OSError:
                refused += 1
        while stage.on:
            time.sleep(0.1)
    return f"{refused} connections refused"


@attack("another owner's settings, inputs, outputs and errors", handler="echo")
def another_owner(stage: Stage) -> str:
    mark = stage.canary
    stage.ask("POST", "/v2/render/runsync", {"input": mark}, key="beta")
    stage.ask("POST", "/invoke/hello", {"input": mark}, key="alpha")
    document = stage.ask("GET", "/openapi.json", key="admin")
    paths = [path for path, operations in document["paths"].items() if "get" in operations]
    asked = 0
    for path, name, key in itertools.product(paths, ("hello", "render"), ("stranger", "caller")):
        filled = path
        for parameter in ("{function}", "{name}", "{model}", "{endpoint}"):
            filled = filled.replace(parameter, name)
        if "{" in filled or "stream" in filled or "events" in filled:
            continue
        with contextlib.closing(
            http.client.HTTPConnection(urlsplit(stage.server.url).netloc, timeout=5)
        ) as connection:
            connection.request("GET", filled, headers={"Authorization": f"Bearer {stage.keys[key]}"})
            with contextlib.suppress(TimeoutError):
                found = connection.getresponse().read(MB)
                if mark.encode() in found:
                    raise Breach(f"GET {filled} with the key {key} shows another owner's text")
            asked += 1
    return f"{asked} answers without it"


@attack("escape sequences for the operator's terminal", handler="escapes")
def terminal(stage: Stage) -> str:
    while stage.on:
        stage.request("POST", "/invoke/evil", 1)
        time.sleep(0.1)
    env = {**os.environ, "PILOTFLAME_URL": stage.server.url, "PILOTFLAME_API_KEY": stage.keys["admin"]}
    for command in (["logs", "evil"], ["status", "evil"], ["list"]):
        run = subprocess.run(
            [sys.executable, "-m", "pilotflame.runtime.cli", *command],
            env=env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        shown = run.stdout + run.stderr
        if any(sign in shown for sign in ("\x1b", "\x9b", "\x07")):
            raise Breach(f"{command} shows {json.dumps(shown[:300])}")
    return "none shown"


@attack("requests as a page of another origin sends them, with an admin's key", handler="echo")
def other_origins(stage: Stage) -> str:
    port = urlsplit(stage.server.url).port
    key = {"Authorization": f"Bearer {stage.keys['admin']}"}
    wrong = list[str]()
    for origin, site in itertools.product(
        (f"http://evil.localhost:{port}", "https://evil.example", "null"), ("same-site", "cross-site")
    ):
        page = {"Origin": origin, "Sec-Fetch-Site": site, "Sec-Fetch-Mode": "cors", **key}
        for method, path in (
            ("POST", "/v1/keys"),
            ("POST", "/v1/functions"),
            ("GET", "/v1/functions/hello"),
            ("POST", "/invoke/hello"),
        ):
            kind = {"Content-Type": "text/plain"}
            status = raw(stage, method, path, b'{"name": "x", "scopes": ["admin"]}', {**page, **kind})()
            if status < 400:
                wrong.append(f"{method} {path} from {origin}, {site}: {status}")
    if wrong:
        raise Breach("; ".join(wrong))
    return "all refused"


@attack("AWS signatures that name a header of 56 KB and of 0.9 MB 2,000 times")
def signatures(stage: Stage) -> str:
    at, key_id = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()), stage.keys["alpha"].split("_")[1]
    scope = f"{key_id}/{at[:8]}/eu-west-1/lambda/aws4_request"
    signed = "host;x-amz-date" + ";a" * 2000
    authorization = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders={signed}, Signature={'0' * 64}"
    fields = {"Authorization": authorization, "X-Amz-Date": at}
    path = "/lambda/2015-03-31/functions/hello/invocations"
    sends = [bare(stage, "POST", path, fields, ["a: " + "x " * 4000] * lines) for lines in (7, 110)]
    return repeat(stage, itertools.cycle(sends))


@attack("headers of 1 MB: lists of commas, and headers that do not end")
def headers(stage: Stage) -> str:
    fields = {"Authorization": f"Bearer {stage.keys['alpha']}"}
    names = ("Prefer", "Accept", "Accept-Encoding", "Forwarded", "X-Forwarded-For", "Cache-Control", "Cookie")
    lists = [
        bare(stage, "POST", "/invoke/hello", fields, [f"{name}: {',' * 8000}"] * lines)
        for name in names
        for lines in (7, 110)
    ]
    open_ones, address = contextlib.ExitStack(), urlsplit(stage.server.url)
    with open_ones:
        for _ in range(IDLE):
            with contextlib.suppress(OSError):
                place = (address.hostname or "", address.port or 80)
                sock = open_ones.enter_context(socket.create_connection(place, timeout=1))
                sock.sendall(
                    b"GET /invoke/hello HTTP/1.1\r\nHost: x\r\n" + (b"a: " + b"x" * 8000 + b"\r\n") * 120
                )
        return repeat(stage, itertools.cycle(lists))


@attack(
    "a schema of 0.9 MB, and one whose example has 10 billion characters", handler="schemas", functions=20
)
def schemas(stage: Stage) -> str:
    sends = [raw(stage, "GET", path, b"", {}, "admin") for path in ("/openapi.json", "/v1/functions")]
    return repeat(stage, itertools.cycle(sends))


def bare(stage: Stage, method: str, path: str, fields: Mapping[str, str], lines: Sequence[str]) -> Send:
    """Return a function that sends a request with these further lines of its header, and returns the status."""
    address = urlsplit(stage.server.url)
    named = [f"{name}: {value}" for name, value in fields.items()]
    head = [
        f"{method} {path} HTTP/1.1",
        f"Host: {address.netloc}",
        "Content-Length: 2",
        *named,
        *lines,
        "",
        "{}",
    ]
    sent = "\r\n".join(head).encode()

    def send() -> int:
        with socket.create_connection((address.hostname or "", address.port or 80), timeout=60) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(sent)
            with contextlib.suppress(OSError, IndexError):
                return int(sock.recv(4096).split()[1])
            return 0

    return send
