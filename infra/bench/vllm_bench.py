"""The template vllm beside vLLM's own server, both on processors: the first token from zero, and streams of 1, 4 and 16 callers.

Both sides have the same generated models, the same memory for keys and values, and warm caches. A pair is one start of each side.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import process_tree
import psutil
import tokenizers
import torch
import transformers
from control import Control
from percentiles import percentile
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME
from report import Report
from servers import HERE, Server, free_port, running, start_pilotflame

sys.path.append(str(HERE.parents[1] / "tests"))
import vllm_environment

TEMPLATES = HERE.parents[1] / "templates"
CACHE_BYTES = 256 << 20
MOST_TOKENS = 1024
STREAMED = 128
SHAPES: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 2_000},
    "400mb": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "vocab_size": 32_000},
}
START_S = 900.0
PARTS = ("eager", "compiled", "local", "streams", "memory")


class Stream(NamedTuple):
    """The times at which the tokens of one answer came, in seconds."""

    times_s: list[float]

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times_s)]


def write_model(folder: Path, shape: dict[str, Any]) -> None:
    """Write a llama in bfloat16 with heads of 64, a tokenizer of words, and a manifest."""
    config = transformers.LlamaConfig(
        **shape, num_attention_heads=shape["hidden_size"] // 64, num_key_value_heads=shape["hidden_size"] // 128,
        max_position_embeddings=2 * MOST_TOKENS, dtype="bfloat16", bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    words = {f"w{number}": number for number in range(shape["vocab_size"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0").save_pretrained(folder)  # type: ignore[no-untyped-call]
    create(folder).write(folder / MANIFEST_NAME)


@contextmanager
def own_server(folder: Path, caches: Path, *, eager: bool) -> Iterator[Server]:
    """Start vLLM's own server from nothing, and yield it after its first token."""
    port = free_port()
    command = [
        str(vllm_environment.python_of_cache()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
        "--served-model-name", "m", "--port", str(port), "--host", "127.0.0.1", "--max-model-len", str(MOST_TOKENS),
        "--kv-cache-memory-bytes", str(CACHE_BYTES), "--no-enable-prefix-caching", *(["--enforce-eager"] if eager else []),
    ]  # fmt: skip
    # Without the last variable, vLLM 0.32 compiles at each start.
    env = {
        "VLLM_CACHE_ROOT": str(caches),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_AOT_COMPILE": "0",
    }
    with running("vllm", command, env) as server:
        server.wait_answer(f"http://127.0.0.1:{port}", "/v1/completions", asked(1), START_S)
        yield server


def asked(tokens: int, *, stream: bool = False, model: str = "m") -> bytes:
    prompt = " ".join(f"w{number}" for number in range(1, 17))
    fields = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return json.dumps({**fields, "stream": stream}).encode()


class Ours:
    """A function of a gateway in vLLM's environment: `m` from the template vllm, or `own` from text-generation."""

    def __init__(self, server: Server, name: str = "m") -> None:
        self.server, self.name = server, name

    def deploy(self, folder: Path, *, eager: bool) -> None:
        template = TEMPLATES / ("vllm" if self.name == "m" else "text-generation")
        with tempfile.TemporaryDirectory(prefix="pf-vllm-") as made:
            function = Path(made)
            arguments = (
                f"max_model_len={MOST_TOKENS}, kv_cache_memory_bytes={CACHE_BYTES}, enforce_eager={eager}"
            )
            text = (template / "handler.py").read_text()
            if self.name == "m":
                text = text.replace("adapters=context.adapters", f"adapters=context.adapters, {arguments}")
            (function / "handler.py").write_text(text)
            settings = tomllib.loads((template / "pilotflame.toml").read_text())
            kept = {key: settings[key] for key in ("idempotent", "concurrency")}
            # The first compilation takes minutes.
            kept |= {
                "snapshot": str(folder),
                "build_timeout_s": 600,
                "scale.max": 2,
                "hold_s": START_S,
                "timeout_s": START_S,
            }
            with closing(Control(self.server.url)) as control:
                control.deploy(str(function), name=self.name, **kept)

    def processes(self, kind: str) -> list[psutil.Process]:
        return [
            one
            for one in process_tree.tree(self.server.pid)
            if f"pilotflame: {kind} {self.name}" in " ".join(one.cmdline())
        ]

    def to_zero(self, *, standby: bool) -> None:
        """End the workers. With `standby`, wait until there is a standby. Without it, kill the standbys."""
        with closing(Control(self.server.url)) as control:
            for worker in self.processes("worker"):
                worker.terminate()
            control.wait_for(self.name, workers=0, standby=standby or None)
        if not standby:
            for one in self.processes("standby"):
                one.kill()

    def first_s(self) -> tuple[float, dict[str, float]]:
        """Return the seconds to the first token, and the milliseconds of each phase."""
        began_s = time.perf_counter()
        request = urllib.request.Request(
            f"{self.server.url}/v1/completions",
            asked(1, model=self.name),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            answer.read()
            phases = {
                name: float(ms)
                for name, ms in re.findall(r"(\w+);dur=([\d.]+)", answer.headers["Server-Timing"])
            }
        return time.perf_counter() - began_s, phases


@contextmanager
def ours(folder: Path, *, eager: bool, state: Path | None = None) -> Iterator[Ours]:
    with start_pilotflame(python=vllm_environment.python_of_cache(), state=state) as server:
        function = Ours(server)
        function.deploy(folder, eager=eager)
        yield function


def starts(report: Report, name: str, folder: Path, pairs: int, *, eager: bool) -> float:
    """Measure pairs of starts. Return the median ratio of our start from ZYGOTE to the start of vLLM's own server."""
    kind = "eager" if eager else "compiled"
    found: dict[str, list[float]] = {"own": [], "zygote": [], "standby": [], "ratio": []}
    with tempfile.TemporaryDirectory(prefix="pf-vllm-") as caches, ours(folder, eager=eager) as function:
        # The first start of each side fills its caches.
        with own_server(folder, Path(caches), eager=eager):
            function.first_s()
        for _ in range(pairs):
            began_s = time.perf_counter()
            with own_server(folder, Path(caches), eager=eager):
                found["own"].append(time.perf_counter() - began_s)
            function.to_zero(standby=False)
            took_s, phases = function.first_s()
            found["zygote"].append(took_s)
            found["ratio"].append(took_s / found["own"][-1])
            report.row(model=name, kind=kind, zygote_s=took_s, own_s=found["own"][-1], phases_ms=phases)
            function.to_zero(standby=True)
            found["standby"].append(function.first_s()[0])
    for part in ("own", "zygote", "standby"):
        report.add(
            f"vllm_{part}_s_{kind}_{name}",
            statistics.median(found[part]),
            f"s; at most {max(found[part]):.2f}",
        )
    return statistics.median(found["ratio"])


def local_s(folder: Path) -> float:
    """Return the seconds from a call to its first token, right after a start of the gateway, when there is no zygote."""
    with tempfile.TemporaryDirectory(prefix="pf-vllm-") as state:
        with ours(folder, eager=True, state=Path(state)):
            pass
        with start_pilotflame(python=vllm_environment.python_of_cache(), state=Path(state)) as server:
            return Ours(server).first_s()[0]


def streams(url: str, callers: int, model: str = "m") -> list[Stream]:
    """Let callers stream one answer each, all at once."""

    def one(_: int) -> Stream:
        request = urllib.request.Request(
            f"{url}/v1/completions",
            asked(STREAMED, stream=True, model=model),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return Stream([time.perf_counter() for line in answer if line.startswith(b"data: {")])

    with ThreadPoolExecutor(callers) as threads:
        return list(threads.map(one, range(callers)))


def rate(found: list[Stream]) -> float:
    """Return the tokens per second of all streams together."""
    began, ended = min(one.times_s[0] for one in found), max(one.times_s[-1] for one in found)
    return sum(len(one.times_s) for one in found) / (ended - began)


def warm(report: Report, folder: Path, rounds: int) -> None:
    """Measure streams through our gateway beside those of vLLM's own server. One side is paused while the other is measured."""
    worst: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="pf-vllm-") as caches,
        ours(folder, eager=True) as function,
        own_server(folder, Path(caches), eager=True) as other,
    ):
        other.pause()
        own = Ours(function.server, "own")
        own.deploy(folder, eager=True)
        own.to_zero(standby=True)
        report.add("own_standby_s", own.first_s()[0], "s, the first token of the own engine")
        sides = ((function.server, "m"), (other, "m"), (function.server, "own"))
        function.server.pause()
        for callers in (1, 4, 16):
            found: list[list[list[Stream]]] = [[] for _ in sides]
            # The first round warms up.
            for _ in range(rounds + 1):
                for (server, model), kept in zip(sides, found, strict=True):
                    server.resume()
                    kept.append(streams(server.url, callers, model))
                    server.pause()
            mine, theirs, owns = (one[1:] for one in found)
            for name, measured, target in (("vllm", mine, ">= 0.95"), ("own", owns, "")):
                ratio = statistics.median(
                    rate(one) / rate(two) for one, two in zip(measured, theirs, strict=True)
                )
                each = [statistics.median(map(rate, side)) for side in (measured, theirs)]
                text = f"x; {each[0]:.1f} and {each[1]:.1f} tokens/s"
                report.add(f"{name}_tokens_ratio_{callers}", ratio, text, target)
            worst.append(
                statistics.median(late_s(one) / late_s(two) for one, two in zip(mine, theirs, strict=True))
            )
        function.server.resume()
    report.add("vllm_gap_p99_ratio", max(worst), "x", "<= 1.2")


def late_s(found: list[Stream]) -> float:
    """Return the 99th percentile of the time between two tokens."""
    return percentile([gap for one in found for gap in one.gaps_s], 0.99)


def private_mb(folder: Path) -> float:
    """Return the private memory of a second worker, with its engine's process, before its first request, in MB."""
    with ours(folder, eager=True) as function, closing(Control(function.server.url)) as control:
        before = {one.pid for one in function.processes("worker")}
        control.request("POST", "/v2/m/warmup", {"workers": 2, "wait_s": 300})
        second = next(one for one in function.processes("worker") if one.pid not in before)
        found = [one.memory_full_info().uss for one in (second, *second.children(recursive=True))]
    return sum(found) / 1e6


def measure(report: Report, pairs: int, compiled: int, rounds: int, parts: Sequence[str] = PARTS) -> None:
    """Add the figures of `parts` to a report. `pairs` and `compiled` are the numbers of pairs of starts without and with compiled code."""
    vllm_environment.python()
    with tempfile.TemporaryDirectory(prefix="pf-vllm-", dir="/tmp") as made:
        folders = {name: Path(made) / name for name in SHAPES}
        for name, folder in folders.items():
            write_model(folder, SHAPES[name])
        for kind, count in (("eager", pairs), ("compiled", compiled)):
            if kind in parts:
                with report.part(f"vLLM, starts, {kind}"):
                    each = [
                        starts(report, name, folder, count, eager=kind == "eager")
                        for name, folder in folders.items()
                    ]
                    report.add(
                        f"vllm_zygote_ratio_{kind}", max(each), "x, the worse of the models", "<= 0.12"
                    )
        if "local" in parts:
            with report.part("vLLM, from LOCAL"):
                report.add("vllm_local_s", local_s(folders["small"]), "s")
        if "streams" in parts:
            with report.part("vLLM, streams"):
                warm(report, folders["400mb"], rounds)
        if "memory" in parts:
            with report.part("vLLM, memory"):
                used = private_mb(folders["small"])
                report.add(
                    "vllm_private_mb",
                    used - (CACHE_BYTES + 1.6e6) / 1e6,
                    "MB beyond weights and cache",
                    "<= 150",
                )
