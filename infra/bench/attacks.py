"""The attacks of `make attack`. The hostile functions are in tests/hostile."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from attack_stage import ATTACKS, HELLO, Attack, Breach, Stage, attack, trap
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

HOSTILE = Path(__file__).resolve().parents[2] / "tests" / "hostile"
SPY, PRINTS, GREETS, FLOODS, FORKS, FILLS = (
    (HOSTILE / f"{name}.py").read_text() for name in ("spy", "prints", "greets", "floods", "forks", "fills")
)
LARGE = "def handler(event):\n    return 'x' * (64 << 20)\n"
SLOW = "import time\ndef handler(event):\n    time.sleep(0.02)\n"
SPIED = {
    "files": "keys and secrets in all files, and devices of disks",
    "environment": "keys and secrets in environments and /proc",
    "memory": "keys and secrets in the memory of processes, with ptrace",
    "sockets": "used and forged tokens on the link socket, other sockets, metadata of clouds",
}
ADDRESSES = [["169.254.169.254", 80], ["169.254.170.2", 80], ["10.0.2.2", 80], ["1.1.1.1", 53]]
ENGINES = ["/var/run/docker.sock", "/run/podman/podman.sock", "/run/dbus/system_bus_socket"]
HOOKS = {"webhook_networks": ["127.0.0.2/32"]}
MOST_LOG_MB, MOST_WRITTEN_MB, MOST_RESULTS_MB, MOST_WAIT_S = 100, 1200, 1024, 5.0


def spied(stage: Stage, do: str) -> str:
    """Let the spy look in one way until the time is over."""
    state, rounds, port = str(stage.state), 0, urlsplit(stage.server.url).port
    event: dict[str, Any] = {
        "link": f"{state}/run/link.sock", "sockets": [f"{state}/run/own.sock", stage.engine.removeprefix("unix://"), *ENGINES],
        "addresses": [["127.0.0.1", port], *ADDRESSES], "paths": private_files(stage),
    }  # fmt: skip
    while stage.on or not rounds:
        rounds += 1
        if found := stage.evil(do=do, **event):
            raise Breach(f"the container found {found}")
    return f"nothing found in {rounds} rounds"


def private_files(stage: Stage) -> list[str]:
    """Return the paths of the files that hold keys of the gateway, and secrets."""
    return [str(path) for folder in ("access", "run") for path in (stage.state / folder).rglob("*")]


for way, tries in SPIED.items():
    ATTACKS[way] = Attack(tries, functools.partial(spied, do=way), handler=SPY)


@attack("code that runs at a deploy, and archives that lead outside")
def build_steps(stage: Stage) -> str:
    marker, keys, code = (
        stage.root / "marker",
        str(stage.state / "access" / "keys.json"),
        {"handler.py": HELLO},
    )
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
        if stage.deploy(members, settings)[0] < 400:
            raise Breach(f"{what} was deployed")
    setup, cog = f"open({str(marker)!r}, 'w')\n", f"build:\n  run: [touch {marker}]\n"
    stage.deploy({**code, "requirements.txt": "./evil\n", "evil/setup.py": setup, "cog.yaml": cog}, {})
    if marker.exists():
        raise Breach("setup.py or cog.yaml ran on the machine of the gateway")
    status, answer = stage.deploy({"handler.py": SPY}, {"env.PATHS": ":".join(private_files(stage))})
    if status != 201:
        raise RuntimeError(f"the spy was not deployed: {answer}")
    return (
        f"{len(hostile)} deploys refused, setup.py did not run; at import and build: {spied(stage, 'build')}"
    )


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


@attack("webhooks and a snapshot that an allowed server redirects to loopback", handler=HELLO, gateway=HOOKS)
def redirects(stage: Stage) -> str:
    with trap() as (target, hits), trap("127.0.0.2", target) as (allowed, redirected):
        while stage.on or not redirected:
            stage.ask("POST", "/v2/evil/run", {"input": 1, "webhook": f"{allowed}/hook"})
            time.sleep(0.5)
        hooks, key = (
            len(redirected),
            {"name": "other", "scopes": ["deploy"], "policy": {"snapshots": [f"{allowed}/*"]}},
        )
        stage.keys["deployer"] = stage.ask("POST", "/v1/keys", key, key="admin")["key"]
        stage.deploy({"handler.py": HELLO}, {"snapshot": f"{allowed}/weights"})
        if hits:
            raise Breach(
                f"the gateway followed to {hits[:3]}, which its settings or the policy of the key forbid"
            )
        return f"redirects of {hooks} webhooks and {len(redirected) - hooks} reads were not followed"


@attack("prints of 65,536 lines", handler=PRINTS)
def prints(stage: Stage) -> str:
    lines = stage.evil(s=stage.seconds)
    stored_mb = sum(path.stat().st_size for path in stage.state.rglob("*.jsonl*")) / 1e6
    if stored_mb > MOST_LOG_MB:
        raise Breach(f"{stored_mb:.0f} MB of logs are stored")
    return f"{lines:,} lines printed, {stored_mb:.1f} MB stored"


@attack("1,000 silent connections to the link socket", handler=GREETS)
def greetings(stage: Stage) -> str:
    return f"{stage.evil(s=stage.seconds, link=f'{stage.state}/run/link.sock'):,} connections were closed"


@attack("chunk frames beyond the credit, 1 GiB, to a caller that reads nothing", handler=FLOODS)
def frames(stage: Stage) -> str:
    headers = {"Authorization": f"Bearer {stage.keys['caller']}", "Accept": "text/event-stream"}
    with contextlib.closing(stage.connected()) as connection:
        connection.request("POST", "/invoke/evil", json.dumps({"s": stage.seconds}), headers)
        time.sleep(stage.seconds)
    return "the caller left"


@attack("a fork bomb", handler=FORKS)
def fork_bomb(stage: Stage) -> str:
    return f"{stage.evil(s=stage.seconds):,} forks refused in the first process"


@attack("disks are filled", handler=FILLS)
def disk(stage: Stage) -> str:
    written = stage.evil(s=stage.seconds)
    if sum(written.values()) > MOST_WRITTEN_MB:
        raise Breach(f"the container has written {written} MiB")
    return f"at most {written} MiB written"


@attack("results of jobs fill the disk of the gateway: 24 of 64 MiB", handler=LARGE)
def results(stage: Stage) -> str:
    for _ in range(24):
        stage.request("POST", "/v2/evil/runsync", {"input": 1})
    stored_mb = sum(path.stat().st_size for path in stage.state.glob("jobs.sqlite3*")) / 1e6
    if stored_mb > MOST_RESULTS_MB:
        raise Breach(f"{stored_mb:,.0f} MB of results of one tenant are stored")
    return f"{stored_mb:,.0f} MB of results of one tenant are stored"


def submit_and_restart(stage: Stage) -> None:
    body = json.dumps({"input": "x" * ((10 << 20) - 64)}).encode()
    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(lambda _: stage.request("POST", "/v2/shared/run", body)[0], range(400)))
    stage.note = f"{statuses.count(200)} accepted; until the restart at most {max(stage.seen)[0]:.0f} MB"
    stage.stop()
    stage.start()


@attack("400 jobs of 10 MiB wait at a restart", shared=SLOW, prepare=submit_and_restart)
def restart(stage: Stage) -> str:
    waiting, first = stage.ask("GET", "/v2/shared/health", key="admin")["jobs"]["inQueue"], len(stage.seen)
    time.sleep(stage.seconds)
    return f"{stage.note}, then {max(stage.seen[first:])[0]:.0f} MB; {waiting} jobs waited"


@attack("jobs queued before another tenant's one", shared=SLOW)
def turns(stage: Stage) -> str:
    accepted, kind = 0, {"Content-Type": "application/cloudevents-batch+json"}
    event = {"specversion": "1.0", "source": "/evil", "type": "evil", "data": 1}
    for first in range(0, stage.jobs, 1000):
        batch = [{**event, "id": str(number)} for number in range(first, first + 1000)]
        status, _ = stage.request("POST", "/v2/shared/run", batch, headers=kind)
        accepted += 1000 * (status == 202)
    begun_s = time.monotonic()
    status, answer = stage.request("POST", "/v2/shared/runsync?wait=30000", {"input": 1}, key="beta")
    took_s = time.monotonic() - begun_s
    text = f"{accepted:,} of {stage.jobs:,} accepted; the other tenant's job took {took_s:.2f} s"
    if status != 200 or answer["status"] != "COMPLETED" or took_s > MOST_WAIT_S:
        raise Breach(f"{text}: {status} {answer}")
    return text


@attack("200 unfinished bodies of 10 MiB with bogus signatures of another tenant's key")
def bodies(stage: Stage) -> str:
    (_, key_id, secret), parts = stage.keys["alpha"].split("_"), urlsplit(stage.server.url)
    path, day = "/lambda/2015-03-31/functions/hello/invocations", datetime.datetime.now(datetime.UTC)
    scope = f"Credential={key_id}/{day:%Y%m%d}/us-east-1/lambda/aws4_request"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nX-Amz-Date: {day:%Y%m%dT%H%M%SZ}\r\nContent-Length: {10 << 20}\r\n"
        f"Authorization: AWS4-HMAC-SHA256 {scope}, SignedHeaders=host;x-amz-date, Signature={'0' * 64}\r\n\r\n"
    )

    def signed() -> tuple[int, float]:
        """Send a signed call of the other tenant. Return its status, and the seconds that it took."""
        begun_s = time.monotonic()
        request = AWSRequest("POST", stage.server.url + path, data=json.dumps("x" * (256 << 10)))
        SigV4Auth(Credentials(key_id, secret), "lambda", "us-east-1").add_auth(request)
        status, _ = stage.request("POST", path, request.body, key="", headers=dict(request.headers))
        return status, time.monotonic() - begun_s

    before, _ = signed()
    with contextlib.ExitStack() as held:
        for _ in range(200):
            sock = held.enter_context(socket.create_connection((parts.hostname, parts.port), 0.02))
            # The gateway reads what it admits. The rest waits.
            with contextlib.suppress(TimeoutError):
                sock.sendall(head.encode() + bytes(9 << 20))
        meanwhile, took_s = signed()
    text = f"signed call of 256 KiB by the other tenant: {before}; meanwhile {meanwhile} in {took_s:.1f} s"
    if (before, meanwhile) != (200, 200) or took_s > MOST_WAIT_S:
        raise Breach(text)
    return text


@attack(
    "warm-ups of 64 workers for a day",
    handler=HELLO,
    settings={"scale.max": "64"},
    gateway={"max_workers": 6},
)
def warmup(stage: Stage) -> str:
    statuses = set()
    while stage.on:
        statuses.add(stage.request("POST", "/v2/evil/warmup?workers=64&for_s=86400")[0])
        time.sleep(0.2)
    workers = stage.ask("GET", "/v1/functions/evil", key="deployer")["workers"]
    return f"{sorted(statuses)}: {workers['ready']} of 6 places held"
