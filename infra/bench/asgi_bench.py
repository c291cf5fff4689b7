"""Requests per CPU second of web apps as functions, beside uvicorn with one worker, in interleaved rounds.

    make bench-asgi

The CPU time of a function includes the gateway and all its processes. uvicorn runs with uvloop and httptools, and without an
access log. The app is a hello of FastAPI; a bare ASGI app, which costs nearly nothing itself, shows the servers alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import hello
from control import gateway
from percentiles import median
from report import Report, parser
from servers import HERE, Server, free_port, running

FOLDER = HERE / "functions" / "hello_asgi"
APPS = {
    "fastapi": ("app", b'{"message":"Hello, x!"}', ">= 0.5"),
    "bare": ("pure", b'{"message":"Hello, x!"}\n', ""),
}
"""By name: the app in the file, its answer, and the target of the ratio."""


@contextmanager
def start_uvicorn(app: str) -> Iterator[Server]:
    """uvicorn with one worker. `POST /hello`."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", f"app:{app}", "--app-dir", str(FOLDER), "--port", str(port)]
    command += ["--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "warning"]
    with running("uvicorn", command) as server:
        server.wait_answer(f"http://127.0.0.1:{port}", "/hello", hello.BODY)
        yield server


@contextmanager
def subjects() -> Iterator[list[hello.Subject]]:
    """Run all servers at once, so that rounds can be interleaved."""
    with ExitStack() as stack:
        found = []
        for name, (app, answer, _) in APPS.items():
            server, control = stack.enter_context(gateway())
            control.deploy(str(FOLDER), name="hello", asgi=f"app:{app}")
            found.append(hello.Subject(f"ours_{name}", server, "/asgi/hello/hello", expect=answer))
            uvicorn = stack.enter_context(start_uvicorn(app))
            found.append(hello.Subject(f"uvicorn_{name}", uvicorn, "/hello", expect=answer))
        yield found


def measure(report: Report, rounds: int) -> None:
    """Enter the CPU time and the rate of each server, and the ratio of requests per CPU second in the same round."""
    with subjects() as entered:
        hello.run_rounds(report, entered, rounds)
    for subject in entered:
        report.add(f"{subject.name}_cpu_us_per_request", subject.median("cpu_us"), "us")
        report.add(f"{subject.name}_rps_{hello.CALLERS}", subject.median("per_second"), "/s")
        report.add(f"{subject.name}_p50_ms", subject.median("p50_ms"), "ms")
    by_name = {subject.name: subject for subject in entered}
    for name, (_, _, target) in APPS.items():
        pairs = zip(by_name[f"uvicorn_{name}"].rounds, by_name[f"ours_{name}"].rounds, strict=True)
        ratio = median([theirs.cpu_us / own.cpu_us for theirs, own in pairs])
        report.add(f"{name}_requests_per_cpu_s", ratio, "of uvicorn's", target)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=7)
    options = made.parse_args()
    report = Report("asgi", packages=("uvicorn", "fastapi", "starlette"))
    with report.part("hello"):
        measure(report, options.rounds)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
