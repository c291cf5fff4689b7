"""Ten language models of 1 GB behind one gateway in 4 GB of memory, with callers who choose at random.

    python infra/bench/soak_models.py [--seconds N] [--callers N]

Each answer is right, or a refusal with Retry-After. It prints how long callers wait, and the rungs of the functions at the end.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from control import Control, gateway
from gpu_model import TEMPLATE
from llm_bench import LARGE, write_model
from pilotflame.runtime.launching.cgroups import make_cgroup
from pilotflame.runtime.settings.resources import Resources
from report import parser

MODELS = 10
MEMORY_MB = 4096
TOKENS = 4
PATIENCE_S = 60


@dataclass
class Tally:
    """What callers got."""

    statuses: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    """The seconds until an answer."""
    wrong: list[str] = field(default_factory=list)


def call(address: str, number: int, wanted: dict[int, str], tally: Tally) -> None:
    """Ask one model, and check its answer."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S + 30)
    body = {"model": f"model-{number}", "prompt": "w1 w2 w3", "max_tokens": TOKENS, "temperature": 0}
    began_s = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    tally.statuses[str(answer.status)] += 1
    if answer.status == 200:
        found = json.loads(text)["choices"][0]["text"]
        tally.waits_s.append(time.perf_counter() - began_s)
        if found != wanted.setdefault(number, found):
            tally.wrong.append(f"model-{number}: {found!r}, not {wanted[number]!r}")
    elif answer.status not in (429, 503) or "Retry-After" not in answer.headers:
        tally.wrong.append(f"model-{number}: {answer.status} {text[:300]}")
    else:
        time.sleep(min(5.0, float(answer.headers["Retry-After"])))


@contextmanager
def limited() -> Iterator[None]:
    """Let this process, and the processes that it starts, have MEMORY_MB of memory in the block."""
    group = make_cgroup(f"pf-models-{os.getpid()}", Resources(memory_mb=MEMORY_MB))
    if group is None:
        raise RuntimeError("this process may not make cgroups with limits of memory")
    for file in group.joins:
        file.write_text(str(os.getpid()))
    try:
        yield
    finally:
        for file in group.joins:
            (file.parent.parent / file.name).write_text(str(os.getpid()))
        group.remove()


def run(control: Control, seconds: float, callers: int) -> Tally:
    """Let callers ask for some time."""
    tally, wanted, lock = Tally(), dict[int, str](), threading.Lock()
    address, until_s = urlsplit(control.url).netloc, time.monotonic() + seconds
    failures: list[BaseException] = []

    def caller(seed: int) -> None:
        drawn = random.Random(seed)
        try:
            while time.monotonic() < until_s:
                with lock:
                    number = drawn.randrange(MODELS)
                call(address, number, wanted, tally)
        except (OSError, http.client.HTTPException) as error:
            failures.append(error)

    threads = [threading.Thread(target=caller, args=(seed,)) for seed in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tally.wrong += [f"a caller failed: {error!r}" for error in failures]
    return tally


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=180.0)
    options.add_argument("--callers", type=int, default=4)
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="pf-models-", dir="/tmp") as place:
        for number in range(MODELS):
            write_model(Path(place) / str(number), LARGE, seed=number)
            print(f"model {number} is written", flush=True)
        with limited(), gateway({"PILOTFLAME_DRAIN_S": "5"}) as (_, control):
            for number in range(MODELS):
                control.deploy(str(TEMPLATE), name=f"model-{number}", snapshot=str(Path(place) / str(number)))
            tally = run(control, arguments.seconds, arguments.callers)
            # The gateway has closed the connection that was idle meanwhile.
            with closing(Control(control.url)) as fresh:
                rungs = Counter(fresh.status(f"model-{number}")["rung"] for number in range(MODELS))
    middle, slow = statistics.median(tally.waits_s), sorted(tally.waits_s)[int(len(tally.waits_s) * 0.95)]
    print(f"{len(tally.waits_s)} answers, median {middle:.2f} s, p95 {slow:.2f} s")
    print(f"statuses {dict(tally.statuses)}, rungs {dict(rungs)}")
    for text in tally.wrong[:10]:
        print(f"WRONG {text}")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
