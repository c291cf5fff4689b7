"""Language models with random weights: the engine beside a bare loop of the same module, beside `generate`, and from zero.

    python infra/bench/llm_bench.py [--rounds N] [--large] [--vllm PART...] [--pairs N] [--compiled N]

Rates are tokens for each second of processor time. The figures of one round are measured one after the other, and their ratio is
taken round by round. With `--vllm`, only parts of vllm_bench.py run. `--large` uses the model of 1 GB beside the bare loop, and for the gaps.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import process_tree
import tokenizers
import torch
import transformers
import vllm_bench
from gpu_model import deployed
from llm_servers import plain_ms, transformers_serve_ms
from llm_tenants import ratios
from pilotflame.handlers.language_model.causal_model import CausalModel
from pilotflame.handlers.language_model.engine import Engine
from pilotflame.handlers.language_model.prefixes import Prefix, Prefixes, write
from pilotflame.handlers.language_model.schedule import MOST_CHUNK
from pilotflame.handlers.sampling.sampler import Sampler
from pilotflame.handlers.sampling.sampling import Sampling
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME
from pilotflame.snapshot.handle import Snapshot
from report import Report, parser

GREEDY = Sampling(temperature=0.0)
WORDS = 32_000
SMALL: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "intermediate_size": 768,
}
LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 17,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
}
ROWS = 16
PREFIX_TOKENS = 1024
WEIGHTS = "model.safetensors"
STEPS = 30
"""The steps of a measurement of the engine."""


def config(shape: dict[str, Any]) -> Any:
    return transformers.LlamaConfig(
        **shape, vocab_size=WORDS, num_key_value_heads=shape["num_attention_heads"] // 2,
        max_position_embeddings=4096, dtype="float32",
    )  # fmt: skip


def module(shape: dict[str, Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    made: Any = transformers.LlamaForCausalLM(config(shape))
    return made.eval()


def write_model(folder: Path, shape: dict[str, Any], seed: int = 0) -> None:
    """Write a model in float32, a tokenizer of words, and a manifest."""
    module(shape, seed).save_pretrained(folder)
    words = {f"w{number}": number for number in range(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")  # type: ignore[no-untyped-call]
    made.save_pretrained(folder)
    create(folder).write(folder / MANIFEST_NAME)


def prompt(tokens: int) -> list[int]:
    return [random.randrange(3, WORDS) for _ in range(tokens)]


def bare_rate(model: Any, rows: int, context: int) -> float:
    """Return the rate of a loop that calls the module for `rows` sequences of one length, and takes the largest logits."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        ids = torch.tensor([prompt(context) for _ in range(rows)])
        ids = (
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
            .logits[:, -1]
            .argmax(-1, keepdim=True)
        )
        began_s = time.process_time()
        for _ in range(STEPS):
            ids = model(input_ids=ids, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
    return rows * STEPS / (time.process_time() - began_s)


def padded_rate(model: Any, prompts: Sequence[list[int]]) -> float:
    """Return the rate of `generate` with prompts that are padded to one length, without its reading of the prompts."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])

    def took_s(new: int) -> float:
        began_s = time.process_time()
        model.generate(
            ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
        )
        return time.process_time() - began_s

    return len(prompts) * STEPS / (took_s(STEPS + 1) - took_s(1))


async def engine_rate(engine: Engine, prompts: Sequence[list[int]]) -> float:
    """Return the rate of the engine while all sequences are in the rows."""
    begun: set[int] = set()
    marks: list[tuple[float, int]] = []
    made = 0

    async def run(number: int, ids: list[int]) -> None:
        nonlocal made
        async with aclosing(engine.generate(ids, Sampler(GREEDY, ids, ()), (), 3000)) as tokens:
            async for _ in tokens:
                begun.add(number)
                if len(begun) == len(prompts):
                    made += 1
                    if not marks or made - marks[0][1] >= len(prompts) * STEPS:
                        marks.append((time.process_time(), made))
                if len(marks) > 1:
                    return

    await asyncio.gather(*(run(number, ids) for number, ids in enumerate(prompts)))
    (begun_s, first), (ended_s, last) = marks[:2]
    return (last - first) / (ended_s - begun_s)


async def gaps(engine: Engine, *, reads: int) -> tuple[float, float]:
    """Return the median and the longest time between two tokens of 4 streams in ms, while a prompt of `reads` tokens is read."""
    times: list[list[float]] = [[] for _ in range(4)]
    ended = asyncio.Event()

    async def run(number: int) -> None:
        ids = prompt(32)
        async with aclosing(engine.generate(ids, Sampler(GREEDY, ids, ()), (), 3000)) as tokens:
            async for _ in tokens:
                times[number].append(time.perf_counter())
                if ended.is_set():
                    return

    async with asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(run(number))
        while min(map(len, times)) < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for one in times:
            one.clear()
        if reads:
            ids = prompt(reads)
            async with aclosing(engine.generate(ids, Sampler(GREEDY, ids, ()), (), 1)) as tokens:
                await anext(tokens)
        else:
            while min(map(len, times)) < 60:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        ended.set()
    found = [later - one for of in times for one, later in pairwise(of)]
    return statistics.median(found) * 1e3, max(found) * 1e3


def prefix_gain(model: CausalModel, folder: Path, rounds: int) -> float:
    """Return the ratio of the processor times of two ways to fill a row with PREFIX_TOKENS: reading the
    tokens, and copying what is stored.
    """
    prefix = Prefix("all", tuple(prompt(PREFIX_TOKENS)))
    write(model, [prefix], {}, folder)
    snapshot = Snapshot(folder, create(folder))
    stored = Prefixes(snapshot)
    stored.read({})
    snapshot.open()
    rows = model.new_rows()

    def took_s(copy: bool) -> float:
        began_s = time.process_time()
        one = model.new_rows(PREFIX_TOKENS)
        one.lengths = [0]
        if copy:
            stored.fill(one, prefix)
        else:
            for begin in range(0, PREFIX_TOKENS, MOST_CHUNK):
                model.forward(one, [[*prefix.ids[begin : begin + MOST_CHUNK]]])
        rows.join(one)
        rows.leave(0)
        return time.process_time() - began_s

    took_s(copy=True)
    return median(rounds, lambda: took_s(copy=False) / took_s(copy=True))


def median(rounds: int, ratio: Callable[[], float]) -> float:
    return statistics.median(ratio() for _ in range(rounds))


def from_zero_ms(folder: Path, rounds: int) -> tuple[float, float]:
    """Return the medians of the time to the first token: from zero, and of a warm worker."""
    found: dict[bool, list[float]] = {True: [], False: []}
    with deployed(folder, "words", **{"scale.idle_timeout_s": 0.3}) as tokens:
        tokens.ms()
        for _ in range(rounds):
            time.sleep(1.0)
            for _ in range(3):
                took_ms, cold = tokens.ms()
                found[cold].append(took_ms)
    return statistics.median(found[True]), statistics.median(found[False])


def dirty_kb(folder: Path) -> int:
    """Return the largest Private_Dirty of the mappings of weights, among two workers that have both answered."""
    # Write the pages to the disk, because unwritten pages count as dirty.
    os.sync()
    with (
        deployed(folder, "words", **{"scale.min": 2, "concurrency": 1}) as tokens,
        ThreadPoolExecutor(2) as threads,
    ):
        tokens.control.wait_for("words", workers=2)
        list(threads.map(lambda _: tokens.ms(), range(8)))
        found = [
            sum(
                int(line.split()[1])
                for mapping in Path(f"/proc/{process.pid}/smaps").read_text().split("VmFlags:")
                if WEIGHTS in mapping
                for line in mapping.splitlines()
                if line.startswith("Private_Dirty:")
            )
            for process in process_tree.tree(tokens.server.pid)
            if WEIGHTS in Path(f"/proc/{process.pid}/maps").read_text()
        ]
    if len(found) < 2:
        raise RuntimeError(f"{len(found)} processes have mapped the weights, and not two")
    return max(found)


def beside_bare_loop(report: Report, shape: dict[str, Any], rounds: int) -> None:
    """Measure the rate of the engine beside that of a bare loop, and what a long prompt does to the gaps of other streams."""
    model = module(shape)
    engine = Engine(CausalModel(model, model.config), ROWS, 65_536)
    engine.rehearse()
    for rows in (1, 4, 16):
        ratio = median(
            rounds,
            lambda rows=rows: (  # type: ignore[misc]
                asyncio.run(engine_rate(engine, [prompt(32) for _ in range(rows)]))
                / bare_rate(model, rows, 48)
            ),
        )
        report.add(f"tokens_vs_bare_loop_{rows}", ratio, "", ">= 0.9")
    # Run once unmeasured, because memory that this machine has never used is slow at first.
    asyncio.run(gaps(engine, reads=1000))
    quiet: list[float] = []

    def worst_gap() -> float:
        quiet.append(asyncio.run(gaps(engine, reads=0))[0])
        return asyncio.run(gaps(engine, reads=1000))[1] / quiet[-1]

    worst = median(rounds, worst_gap)
    report.add("worst_gap_vs_median", worst, f"of {statistics.median(quiet):.0f} ms", "<= 2")


def beside_generate(report: Report, rounds: int) -> None:
    """Measure the rate of the engine beside that of `generate` with padded prompts, on the small model."""
    model = module(SMALL)
    engine = Engine(CausalModel(model, model.config), ROWS, 65_536)
    engine.rehearse()
    ragged = [16, 32, 64, 128, 256, 512, 768, 1024] * 2
    for name, lengths, target in (("ragged", ragged, ">= 1.3"), ("equal", [128] * 16, ">= 0.95")):
        ratio = median(
            # Rounds differ by a tenth, so take the median of at least seven.
            max(7, rounds),
            lambda lengths=lengths: (  # type: ignore[misc]
                asyncio.run(engine_rate(engine, [prompt(one) for one in lengths]))
                / padded_rate(model, [prompt(one) for one in lengths])
            ),
        )
        report.add(f"vs_padded_generate_{name}", ratio, "", target)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--large", action="store_true")
    options.add_argument(
        "--vllm", nargs="+", choices=vllm_bench.PARTS, help="only these parts beside vLLM's own server"
    )
    options.add_argument("--pairs", type=int, default=10, help="of starts beside vLLM's own server")
    options.add_argument("--compiled", type=int, default=10, help="pairs of compiled starts")
    arguments = options.parse_args()
    report = Report("bench-llm", packages=("torch", "transformers"))
    vllm_bench.measure(
        report, arguments.pairs, arguments.compiled, arguments.rounds, arguments.vllm or vllm_bench.PARTS
    )
    if arguments.vllm:
        return report.finish(arguments)
    torch.set_num_threads(1)
    with report.part("beside a bare loop"):
        beside_bare_loop(report, LARGE if arguments.large else SMALL, arguments.rounds)
    with report.part("beside generate"):
        beside_generate(report, arguments.rounds)
    with report.part("tenants"):
        model = module(SMALL)
        causal = CausalModel(model, model.config)
        first, later, words = ratios(lambda: Engine(causal, ROWS, 65_536), arguments.rounds)
        report.add("first_token_beside_128_prompts", first, words, "<= 2")
        report.add("later_token_beside_128_prompts", later, "", "<= 2")
    with report.part("prefixes"), tempfile.TemporaryDirectory(prefix="pf-llm-", dir="/tmp") as folder:
        model = module(SMALL)
        gain = prefix_gain(CausalModel(model, model.config), Path(folder), 2 + arguments.rounds)
        report.add("prefix_gain_1024", gain, "", ">= 15")
    for name, shape, target in (("small", SMALL, "<= 25"), ("1gb", LARGE, "<= 60")):
        with (
            report.part(f"from zero, {name}"),
            tempfile.TemporaryDirectory(prefix="pf-llm-", dir="/tmp") as folder,
        ):
            write_model(Path(folder), shape)
            cold, warm = from_zero_ms(Path(folder), 2 + arguments.rounds)
            report.add(f"zero_first_token_extra_ms_{name}", cold - warm, f"ms over {warm:.1f} ms", target)
            plain, serve = plain_ms(Path(folder)), transformers_serve_ms(Path(folder))
            others = f"ms from zero; a fresh script takes {plain:.0f} ms, `transformers serve` {serve:.0f} ms"
            report.add(f"zero_first_token_ms_{name}", cold, others)
            report.add(f"weights_private_dirty_kb_{name}", dirty_kb(Path(folder)), "", "<= 0")
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
