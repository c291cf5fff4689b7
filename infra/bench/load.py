"""The load generator: `closed_loop`, `open_loop`, and `load_apart`, which runs either in its own process.

    python infra/bench/load.py --url http://127.0.0.1:8000/ --body '{"name": "x"}' --callers 32 --duration-s 2
    python infra/bench/load.py --url http://127.0.0.1:8000/ --rate 500 --summary

Prints one JSON object: the `Tally`, or with --summary its percentiles only.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import uvloop
from closed import closed_loop
from http1 import Request
from opened import open_loop, poisson
from tally import Tally

__all__ = ["Request", "Tally", "closed_loop", "load_apart", "open_loop", "poisson"]


def load_apart(
    request: Request,
    *,
    callers: int = 1,
    duration_s: float = 2.0,
    count: int | None = None,
    warmup_s: float = 0.3,
    rate: float | None = None,
    instants: Path | None = None,
    retry: bool = False,
    seed: int = 1,
    timeout_s: float = 120.0,
) -> Tally:
    """Run the load in a process of its own; an open loop where `rate` or `instants` is given, a closed one otherwise.

    `instants`: a file with a JSON list of the times to send, in ns after the start. `retry`: in an open loop, a refused request
    is sent once more after the stated delay.
    """
    command = [sys.executable, str(Path(__file__)), "--url", request.url, "--method", request.method]
    command += ["--body", request.body.decode(), "--duration-s", str(duration_s), "--seed", str(seed)]
    command += ["--callers", str(callers), "--warmup-s", str(warmup_s)]
    for name, value in request.headers.items():
        command += ["--header", f"{name}: {value}"]
    for name in request.capture:
        command += ["--capture", name]
    if request.expect is not None:
        command += ["--expect", request.expect.decode()]
    if count is not None:
        command += ["--count", str(count)]
    if rate is not None:
        command += ["--rate", str(rate)]
    if instants is not None:
        command += ["--instants", str(instants)]
    command += ["--retry"] * retry
    # A file, not a pipe: more than 64 KiB did not always arrive whole through a pipe.
    with tempfile.TemporaryFile() as told:
        subprocess.run(command, check=True, stdout=told, timeout=timeout_s)
        told.seek(0)
        return Tally.from_json(told.read().decode())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="HTTP/1.1 load on one URL; prints one JSON object.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--method", default="POST")
    parser.add_argument("--body", default="", help="text, or @file")
    parser.add_argument("--header", action="append", default=[], help="'Name: value', repeatable")
    parser.add_argument("--expect", help="the body of a right answer")
    parser.add_argument("--capture", action="append", default=[], help="a response header to bring back")
    parser.add_argument("--callers", type=int, default=1)
    parser.add_argument("--duration-s", type=float, default=2.0)
    parser.add_argument("--count", type=int, default=2**62)
    parser.add_argument("--warmup-s", type=float, default=0.0)
    parser.add_argument(
        "--rate", type=float, help="requests per second: an open loop instead of a closed one"
    )
    parser.add_argument(
        "--instants", type=Path, help="a JSON list of ns after the start: an open loop of these"
    )
    parser.add_argument(
        "--retry", action="store_true", help="open loop: the refused wait as told and come once more"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--summary", action="store_true", help="percentiles instead of every latency")
    return parser.parse_args()


def _request(arguments: argparse.Namespace) -> Request:
    text: str = arguments.body
    body = Path(text[1:]).read_bytes() if text.startswith("@") else text.encode()
    headers = dict(header.split(": ", 1) for header in arguments.header)
    return Request(
        url=arguments.url,
        method=arguments.method,
        body=body,
        headers=headers or {"Content-Type": "application/json"},
        expect=None if arguments.expect is None else arguments.expect.encode(),
        capture=tuple(arguments.capture),
    )


async def _load(arguments: argparse.Namespace) -> Tally:
    request = _request(arguments)
    if arguments.rate is None and arguments.instants is None:
        return await closed_loop(
            request,
            callers=arguments.callers,
            duration_s=arguments.duration_s,
            count=arguments.count,
            warmup_s=arguments.warmup_s,
        )
    if arguments.warmup_s:
        await closed_loop(request, callers=arguments.callers, duration_s=arguments.warmup_s)
    given = arguments.instants
    instants = (
        poisson(arguments.rate, arguments.duration_s, arguments.seed)
        if given is None
        else json.loads(given.read_text())
    )
    return await open_loop(request, instants, retry=arguments.retry)


def main() -> None:
    arguments = _arguments()
    gc.freeze()
    gc.disable()  # a garbage collection in the generator must not count as latency of the server
    tally = uvloop.run(_load(arguments))
    print(json.dumps(tally.summary()) if arguments.summary else tally.to_json())


if __name__ == "__main__":
    main()
