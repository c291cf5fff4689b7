"""The demo: a real model goes from zero to its first answer and back, and each millisecond is accounted for.

`make demo` runs it. Everything is on this machine: the gateway listens on loopback, the model comes from a package.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

import floors
import minilm
from cold import NAME, TEMPLATE, check, fresh_process_ms, mapped_kb
from control import Control, Reply
from rich.console import Console
from rich.table import Table
from servers import start_pilotflame

BURST = 64
CALLERS = 16
IDLE_TIMEOUT_S = 1.5
TOLERATED_SHARE = 0.02
BAR = 16

MEANING = {
    "queue": "read; an activation asked for",
    "fork": "a standby is there already",
    "restore": "weights mapped and assigned",
    "dispatch": "ready; the request sent",
    "link": "to the worker and back",
    "wait": "until the batch starts",
    "exec": "tokenise, forward, answer",
    "respond": "the response written",
}

console = Console()


def main() -> int:
    os.environ.update(minilm.OFFLINE)
    say("Reference", "embeddings by plain transformers, in a process of its own")
    texts = [f"{minilm.TEXT} ({number})" for number in range(BURST)]
    expected = minilm.reference([minilm.TEXT, *texts])
    with start_pilotflame() as server:
        control = Control(server.url)
        try:
            return play(control, texts, expected)
        finally:
            control.close()


def play(control: Control, texts: list[str], expected: list[list[float]]) -> int:
    say("Deploy", f"the template {NAME} on all-MiniLM-L6-v2 (90 MB): import, build, one proof start")
    started = time.perf_counter()
    settings = {"name": NAME, "snapshot": str(minilm.model_folder()), "scale.idle_timeout_s": IDLE_TIMEOUT_S}
    control.deploy(str(TEMPLATE), **settings)
    console.print(f"   live after {time.perf_counter() - started:.1f} s")
    control.wait_for(NAME, workers=0, standby=True)
    show_zero(control)

    say("First request", "nothing runs; it wakes the function and is answered")
    first = control.invoke(NAME, {"text": minilm.TEXT})
    warm = [control.invoke(NAME, {"text": minilm.TEXT}) for _ in range(7)]
    check([first, *warm], expected[0])
    fits = show_phases("Cold start", first, warm)

    burst(control, texts, expected[1:])

    say("Back to zero", f"the idle timeout here is {IDLE_TIMEOUT_S} s")
    control.wait_for(NAME, workers=0, standby=True)
    show_zero(control)
    again = control.invoke(NAME, {"text": minilm.TEXT})
    check([again], expected[0])
    fits &= show_phases("Cold start, once more", again, warm)

    say("Comparison", "the same handler, mapped the same way, as a fresh process")
    fresh_ms = fresh_process_ms(expected[0])
    show_comparison(fresh_ms, first, again, warm)
    return 0 if fits else 1


def show_zero(control: Control) -> None:
    status = control.status(NAME, memory=True)
    workers, processes = status["workers"], status["processes"]
    weights_kb = sum(mapped_kb(process["pid"], ".safetensors") for process in processes)
    table = Table(
        title=f"zero workers ({workers['ready'] + workers['starting'] + workers['draining']}), what is held"
    )
    for column in ("role", "pid", "own MB (uss)", "with its share of shared pages (pss)"):
        table.add_column(column, justify="left" if column == "role" else "right")
    for process in processes:
        table.add_row(
            process["role"], str(process["pid"]), f"{process['uss_mb']:.1f}", f"{process['pss_mb']:.1f}"
        )
    console.print(table)
    console.print(f"   pages of the weights in these processes: {weights_kb} kB")


def show_phases(title: str, reply: Reply, warm: list[Reply]) -> bool:
    """The phases as bars beside their floors; whether they sum to the total."""
    phases = {name: ms for name, ms in reply.phases_ms.items() if name != "total"}
    total = reply.phases_ms["total"]
    least = {"fork": 0.0, "restore": map_floor_ms(), "exec": median(one.phases_ms["exec"] for one in warm)}
    table = Table(title=f"{title}: {reply.ms:.1f} ms as its caller saw it")
    table.add_column("phase", no_wrap=True, min_width=8)
    table.add_column("ms", justify="right", no_wrap=True, min_width=6)
    table.add_column("floor", justify="right", no_wrap=True, min_width=5)
    table.add_column("", width=BAR)
    table.add_column("what it is", no_wrap=True)
    longest = max(phases.values())
    for name, ms in phases.items():
        bar = "█" * max(1, round(ms / longest * BAR)) if ms > longest / BAR / 2 else "▏"
        floor = f"{least[name]:.2f}" if name in least else ""
        table.add_row(name, f"{ms:.2f}", floor, f"[cyan]{bar}[/cyan]", MEANING.get(name, ""))
    table.add_section()
    table.add_row("sum", f"{sum(phases.values()):.2f}", "", "", f"of {total:.2f} ms in the gateway")
    table.add_row("outside", f"{reply.ms - total:.2f}", "", "", "the caller and loopback")
    console.print(table)
    gap = abs(sum(phases.values()) - total) / total
    console.print(
        f"   the phases sum to the total within {gap:.2%}; floors: bare mmap and header parse, a warm handler"
    )
    return gap <= TOLERATED_SHARE


def map_floor_ms() -> float:
    file = minilm.model_folder() / "model.safetensors"
    return floors.again(lambda: floors.map_and_parse_ms(file))


def burst(control: Control, texts: list[str], expected: list[list[float]]) -> None:
    say("Burst", f"{BURST} requests by {CALLERS} callers at once")

    def call(numbers: range) -> list[tuple[int, Reply]]:
        own = Control(control.url)
        try:
            return [(number, own.invoke(NAME, {"text": texts[number]})) for number in numbers]
        finally:
            own.close()

    started = time.perf_counter()
    with ThreadPoolExecutor(CALLERS) as pool:
        parts = list(pool.map(call, [range(start, BURST, CALLERS) for start in range(CALLERS)]))
    elapsed = time.perf_counter() - started
    replies = [pair for part in parts for pair in part]
    worst = max(minilm.difference(reply.body["embedding"], expected[number]) for number, reply in replies)
    if worst > minilm.TOLERANCE:
        raise SystemExit(f"an embedding of the burst differs by {worst:.2e}")
    workers = control.status(NAME)["workers"]["ready"]
    console.print(
        f"   {BURST / elapsed:.0f} answers/s by {workers} worker{'s' * (workers != 1)}, median {median(r.ms for _, r in replies):.0f} ms;"
        f" all equal plain transformers within {worst:.1e}"
    )


def show_comparison(fresh_ms: float, first: Reply, again: Reply, warm: list[Reply]) -> None:
    warm_ms = median(reply.ms for reply in warm)
    table = Table(title="from nothing to the first correct answer")
    table.add_column("")
    table.add_column("ms", justify="right")
    table.add_column("", justify="right")
    table.add_row("a fresh process", f"{fresh_ms:,.0f}", "")
    for name, reply in (("pilotflame, first time", first), ("pilotflame, after zero", again)):
        table.add_row(name, f"{reply.ms:.1f}", f"{fresh_ms / reply.ms:.0f} times faster")
    table.add_row("a warm request", f"{warm_ms:.1f}", "")
    console.print(table)
    figures = {"fresh_ms": fresh_ms, "first_ms": first.ms, "again_ms": again.ms, "warm_ms": warm_ms}
    console.print(
        f"   {json.dumps({name: round(value, 2) for name, value in figures.items()})}", highlight=False
    )


def say(title: str, text: str) -> None:
    console.print(f"\n[bold]{title}[/bold]: {text}")


if __name__ == "__main__":
    sys.exit(main())
