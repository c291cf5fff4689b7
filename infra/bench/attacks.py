"""The attacks of `make attack`. The hostile functions and callers are in tests/hostile."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from attack_stage import ATTACKS, Attack, Breach, Stage, attack, code
from hostile import callers
from hostile.callers import trap

ECHO = {"handler.py": code("echo")}
SPIED = {
    "files": "keys and secrets in all files, and devices of disks",
    "environment": "keys and secrets in environments and /proc",
    "memory": "keys and secrets in the memory of processes, with ptrace",
    "sockets": "used and forged tokens on the link socket, other sockets, metadata of clouds",
}
WIDE = {"scale.max": "64"}
HOOKS = {"webhook_networks": ["127.0.0.2/32"]}
MOST_LOG_MB, MOST_WRITTEN_MB, MOST_RESULTS_MB, MOST_KEPT_MB, MOST_WAIT_S = 100, 1200, 1024, 60, 5.0


def spied(stage: Stage, do: str) -> str:
    """Call the spy again and again until the attack is over. `do` says where it looks: a key of SPIED, or "build"."""
    run, rounds = f"{stage.state}/run", 0
    event: dict[str, Any] = {"link": f"{run}/link.sock", "port": urlsplit(stage.server.url).port}
    event["sockets"] = [f"{run}/own.sock", stage.engine.removeprefix("unix://")]
    while stage.on or not rounds:
        rounds += 1
        if found := stage.evil(do=do, paths=private_files(stage), **event):
            raise Breach(f"the container found {found}")
    return f"nothing found in {rounds} rounds"


def private_files(stage: Stage) -> list[str]:
    """Return the paths of the files that hold keys of the gateway, and secrets."""
    return [str(path) for folder in ("access", "run") for path in (stage.state / folder).rglob("*")]


for way, tries in SPIED.items():
    ATTACKS[way] = Attack(tries, functools.partial(spied, do=way), handler="spy")


@attack("code that runs at a deploy, and archives that lead outside")
def build_steps(stage: Stage) -> str:
    marker, keys = stage.root / "marker", str(stage.state / "access" / "keys.json")
    hostile: dict[str, tuple[dict[str, str], dict[str, str]]] = {
        "a process": (ECHO, {"image.name": ""}),
        "the host's network": (ECHO, {"resources.network": "host"}),
        "another tenant's name": (ECHO, {"name": "hello"}),
        "a snapshot": (ECHO, {"snapshot": keys}),
        "a link": ({**ECHO, "keys": f"-> {keys}"}, {}),
        "a path": ({**ECHO, "../../access/keys.json": "{}"}, {}),
        "an image of a folder": (ECHO, {"image.name": f"dir:{stage.state}"}),
    }
    for what, (members, settings) in hostile.items():
        if stage.deploy(members, settings)[0] < 400:
            raise Breach(f"{what} was deployed")
    setup, cog = f"open({str(marker)!r}, 'w')\n", f"build:\n  run: [touch {marker}]\n"
    stage.deploy({**ECHO, "requirements.txt": "./evil\n", "evil/setup.py": setup, "cog.yaml": cog}, {})
    if marker.exists():
        raise Breach("setup.py or cog.yaml ran on the machine of the gateway")
    status, answer = stage.deploy({"handler.py": code("spy")}, {"env.PATHS": ":".join(private_files(stage))})
    if status != 201:
        raise RuntimeError(f"the spy was not deployed: {answer}")
    found = spied(stage, "build")
    return f"{len(hostile)} deploys refused; setup.py did not run; at import and build, {found}"


@attack("webhooks, alerts and queues at loopback and metadata addresses", handler="echo")
def metadata(stage: Stage) -> str:
    with trap() as (target, hits):
        port = urlsplit(target).port
        hosts = ("127.0.0.1", "localhost", "0.0.0.0", "[::ffff:127.0.0.1]", "2130706433", "127.1")
        urls = [*(f"http://{host}:{port}/" for host in hosts), "http://169.254.169.254/latest/meta-data/"]
        hooks = [{"input": 1, "webhook": url} for url in urls]
        refused = sum(stage.request("POST", "/v2/evil/run", hook)[0] >= 400 for hook in hooks)
        for url in urls[:2]:
            stage.deploy(ECHO, {"alerts.url": url, "alerts.cold_start_ms": "0.001"})
            stage.evil(n=1)
        queue = f"[[source]]\ntype = 'sqs'\nqueue = '{target}/1/q'\nregion = 'us-east-1'\n"
        if stage.deploy({**ECHO, "pilotflame.toml": queue}, {})[0] < 400:
            raise Breach("a queue outside the policy was deployed")
        time.sleep(2)
        if hits:
            raise Breach(f"the gateway sent {hits[:3]}")
    return f"{refused} of {len(urls)} webhooks refused at once, no request sent"


@attack("webhooks and a snapshot that an allowed server redirects to loopback", handler="echo", gateway=HOOKS)
def redirects(stage: Stage) -> str:
    with trap() as (target, hits), trap("127.0.0.2", target) as (allowed, redirected):
        while stage.on or not redirected:
            stage.ask("POST", "/v2/evil/run", {"input": 1, "webhook": f"{allowed}/hook"})
            time.sleep(0.5)
        key = {"name": "other", "scopes": ["deploy"], "policy": {"snapshots": [f"{allowed}/*"]}}
        stage.keys["deployer"] = stage.ask("POST", "/v1/keys", key, key="admin")["key"]
        stage.deploy(ECHO, {"snapshot": f"{allowed}/weights"})
        if hits:
            raise Breach(f"the gateway followed to {hits[:3]}, which settings or the key's policy forbid")
        return f"{len(redirected)} redirects were not followed"


@attack("prints of 65,536 lines", handler="prints")
def prints(stage: Stage) -> str:
    lines = stage.evil(s=stage.seconds)
    stored_mb = sum(path.stat().st_size for path in stage.state.rglob("*.jsonl*")) / 1e6
    if stored_mb > MOST_LOG_MB:
        raise Breach(f"{stored_mb:.0f} MB of logs are stored")
    return f"{lines:,} lines printed, {stored_mb:.1f} MB stored"


@attack("1,000 silent connections to the link socket", handler="greets")
def greetings(stage: Stage) -> str:
    return f"{stage.evil(s=stage.seconds, link=f'{stage.state}/run/link.sock'):,} connections were closed"


@attack("chunk frames beyond the credit, 1 GiB, to a caller that reads nothing", handler="floods")
def frames(stage: Stage) -> str:
    callers.read_nothing(stage.server.url, "/invoke/evil", stage.keys["caller"], stage.seconds)
    return "the caller left"


@attack("a fork bomb", handler="forks")
def fork_bomb(stage: Stage) -> str:
    return f"{stage.evil(s=stage.seconds):,} forks refused in the first process"


@attack("disks are filled", handler="fills")
def disk(stage: Stage) -> str:
    written = stage.evil(s=stage.seconds)
    if sum(written.values()) > MOST_WRITTEN_MB:
        raise Breach(f"the container has written {written} MiB")
    return f"at most {written} MiB written"


@attack(
    "results of jobs fill the disk of the gateway: 24 of 64 MiB",
    handler="large", gateway={"max_stored_bytes": 768 << 20},
)  # fmt: skip
def results(stage: Stage) -> str:
    for _ in range(24):
        stage.request("POST", "/v2/evil/runsync", {"input": 1})
    files = [*stage.state.glob("jobs.sqlite3*"), *stage.state.glob("jobs.bodies/*")]
    stored_mb = sum(path.stat().st_size for path in files) / 1e6
    if stored_mb > MOST_RESULTS_MB:
        raise Breach(f"{stored_mb:,.0f} MB of results of one tenant are stored")
    return f"{stored_mb:,.0f} MB of results of one tenant are stored"


def submit_and_restart(stage: Stage) -> None:
    accepted = callers.submit_large(stage.server.url, "/v2/shared/run", stage.keys["caller"], 400)
    stage.text = f"{accepted} accepted; until the restart at most {max(stage.seen)[0]:.0f} MB"
    stage.stop()
    stage.start()


@attack("400 jobs of 10 MiB wait at a restart", prepare=submit_and_restart)
def restart(stage: Stage) -> str:
    waiting, first = stage.ask("GET", "/v2/shared/health", key="admin")["jobs"]["inQueue"], len(stage.seen)
    time.sleep(stage.seconds)
    return f"{stage.text}, then {max(stage.seen[first:])[0]:.0f} MB; {waiting} jobs waited"


@attack("jobs queued before another tenant's one")
def turns(stage: Stage) -> str:
    accepted = callers.submit_many(stage.server.url, "/v2/shared/run", stage.keys["caller"], stage.jobs)
    begun_s = time.monotonic()
    status, answer = stage.request("POST", "/v2/shared/runsync?wait=30000", {"input": 1}, key="beta")
    took_s = time.monotonic() - begun_s
    text = f"{accepted:,} of {stage.jobs:,} accepted; the other tenant's job took {took_s:.2f} s"
    if status != 200 or answer["status"] != "COMPLETED" or took_s > MOST_WAIT_S:
        raise Breach(f"{text}: {status} {answer}")
    return text


@attack("200 unfinished bodies of 10 MiB with bogus signatures of another tenant's key")
def bodies(stage: Stage) -> str:
    url, key, size = stage.server.url, stage.keys["alpha"], 256 << 10
    before, _ = callers.signed_call(url, key, size)
    with callers.unfinished_bodies(url, key.split("_")[1], 200):
        meanwhile, took_s = callers.signed_call(url, key, size)
    text = f"signed call of 256 KiB by the other tenant: {before}; meanwhile {meanwhile} in {took_s:.1f} s"
    if (before, meanwhile) != (200, 200) or took_s > MOST_WAIT_S:
        raise Breach(text)
    return text


@attack("400 webhook receivers that never answer", handler="echo", gateway=HOOKS)
def deaf(stage: Stage) -> str:
    with callers.deaf_receivers(400) as urls, trap("127.0.0.2") as (target, hits):
        for url in urls:
            stage.ask("POST", "/v2/evil/run", {"input": 1, "webhook": url})
        begun_s, body = time.monotonic(), {"input": {"n": 1}, "webhook": f"{target}/beta"}
        stage.ask("POST", "/v2/render/run", body, key="beta")
        while not hits and time.monotonic() < begun_s + 60:
            time.sleep(0.02)
        took_s = time.monotonic() - begun_s
    text = f"the webhook of the other tenant came after {took_s:.2f} s"
    if took_s > MOST_WAIT_S:
        raise Breach(text)
    return text


FailedCalls = Callable[[int, int], set[int]]
"""Sends failing calls, and returns their statuses. The arguments are the size of the input and the number of
calls.
"""
FAILING = (
    "/invoke/evil", "/v2/evil/runsync", "/tensorflow-serving/v1/models/evil:predict", "/kserve/v1/models/evil:predict",
    "/vertex/v1/projects/p/locations/l/endpoints/evil:predict", "/lambda/2015-03-31/functions/evil/invocations",
)  # fmt: skip
"""A path of each family of routes."""


@attack("1,000 failed calls of 1 MB, and 90 of 19 MB, on each family of routes", handler="fails")
def failures(stage: Stage) -> str:
    return kept_after_failures(stage, failing(stage, FAILING))


def failing(stage: Stage, paths: Sequence[str]) -> dict[str, FailedCalls]:
    """Return, for each path, a function that sends failing calls to it."""
    url, key = stage.server.url, stage.keys["caller"]
    return {path: functools.partial(callers.fail, url, path, key) for path in paths}


def kept_after_failures(stage: Stage, calls: Mapping[str, FailedCalls]) -> str:
    """Send failing calls, and return how much memory the gateway keeps."""
    before_mb, kept = stage.held()[0], dict[str, float]()
    for name, fail in calls.items():
        for size, count in ((1_000_000, 1000), (19_000_000, 90)):
            if (statuses := fail(size, count)) & {400, 401, 403, 404}:
                raise RuntimeError(f"{name} has called nothing: {statuses}")
        time.sleep(10)
        kept[name] = stage.held()[0] - before_mb
    text = f"the gateway keeps at most {max(kept.values()):.0f} MB"
    if max(kept.values()) > MOST_KEPT_MB:
        raise Breach(f"{text}: {kept}")
    return text


@attack("warm-ups of 64 workers for a day", handler="echo", settings=WIDE, gateway={"max_workers": 6})
def warmup(stage: Stage) -> str:
    statuses = set()
    while stage.on:
        statuses.add(stage.request("POST", "/v2/evil/warmup?workers=64&for_s=86400")[0])
        time.sleep(0.2)
    workers = stage.ask("GET", "/v1/functions/evil", key="deployer")["workers"]
    return f"{sorted(statuses)}: {workers['ready']} of 6 places held"
