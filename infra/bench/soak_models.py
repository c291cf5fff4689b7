"""Ten language models of 1 GB, one of them with ten adapters, behind one gateway in 4 GB of memory. Callers choose at random.

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

import peft
import torch
from control import Control, gateway
from gpu_model import TEMPLATE
from llm_bench import LARGE, module, write_model
from pilotflame.runtime.ground.settings.resources import Resources
from pilotflame.runtime.node.launching.cgroups import make_cgroup
from report import parser

MODELS = ADAPTERS = 10
OF_ADAPTERS = 0.3
"""The share of the requests that name an adapter."""
MEMORY_MB = 4096
TOKENS = 4
PATIENCE_S = 60


@dataclass
class Tally:
    """What callers got."""

    statuses: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    """The seconds until an answer."""
    models: set[str] = field(default_factory=set)
    """The models and adapters that have answered."""
    wrong: list[str] = field(default_factory=list)


def write_adapters(folder: Path) -> None:
    """Write adapters of the first model, each into a folder of its own."""
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    made = peft.get_peft_model(module(LARGE), config, "a0")
    for number in range(1, ADAPTERS):
        made.add_adapter(f"a{number}", config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    made.save_pretrained(str(folder))


def drawn_model(drawn: random.Random) -> str:
    """Return the name of a model, or of an adapter of the first one."""
    if drawn.random() < OF_ADAPTERS:
        return f"model-0:a{drawn.randrange(ADAPTERS)}"
    return f"model-{drawn.randrange(MODELS)}"


def call(address: str, model: str, wanted: dict[str, str], tally: Tally) -> None:
    """Ask one model, and check its answer."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S + 30)
    body = {"model": model, "prompt": "w1 w2 w3", "max_tokens": TOKENS, "temperature": 0}
    began_s = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    tally.statuses[str(answer.status)] += 1
    if answer.status == 200:
        found = json.loads(text)["choices"][0]["text"]
        tally.models.add(model)
        tally.waits_s.append(time.perf_counter() - began_s)
        if found != wanted.setdefault(model, found):
            tally.wrong.append(f"{model}: {found!r}, not {wanted[model]!r}")
    elif answer.status not in (429, 503) or "Retry-After" not in answer.headers:
        tally.wrong.append(f"{model}: {answer.status} {text[:300]}")
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
    tally, wanted, lock = Tally(), dict[str, str](), threading.Lock()
    address, until_s = urlsplit(control.url).netloc, time.monotonic() + seconds
    failures: list[BaseException] = []

    def caller(seed: int) -> None:
        drawn = random.Random(seed)
        try:
            while time.monotonic() < until_s:
                with lock:
                    model = drawn_model(drawn)
                call(address, model, wanted, tally)
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
        write_adapters(Path(place) / "adapters")
        with limited(), gateway({"PILOTFLAME_DRAIN_S": "5"}) as (_, control):
            for number in range(MODELS):
                named = range(0 if number else ADAPTERS)
                adapters = {f"adapters.a{one}": f"{place}/adapters/a{one}" for one in named}
                control.deploy(
                    str(TEMPLATE), name=f"model-{number}", snapshot=str(Path(place) / str(number)), **adapters
                )
            tally = run(control, arguments.seconds, arguments.callers)
            # The gateway has closed the connection that was idle meanwhile.
            with closing(Control(control.url)) as fresh:
                rungs = Counter(fresh.status(f"model-{number}")["rung"] for number in range(MODELS))
    middle, slow = statistics.median(tally.waits_s), sorted(tally.waits_s)[int(len(tally.waits_s) * 0.95)]
    print(f"{len(tally.waits_s)} answers, median {middle:.2f} s, p95 {slow:.2f} s")
    print(f"{len(tally.models)} models and adapters have answered")
    print(f"statuses {dict(tally.statuses)}, rungs {dict(rungs)}")
    for text in tally.wrong[:10]:
        print(f"WRONG {text}")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
