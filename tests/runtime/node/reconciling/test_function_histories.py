"""The stored histories of functions."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path

import pytest
from pilotflame.runtime.ground.billing.account import Account
from pilotflame.runtime.ground.billing.usage import Prices
from pilotflame.runtime.ground.storing.file_documents import FileDocuments
from pilotflame.runtime.ground.telemetry.background import BackgroundTasks
from pilotflame.runtime.ground.telemetry.rung_name import RungName
from pilotflame.runtime.node.reconciling import function_histories
from pilotflame.runtime.node.reconciling.function_histories import NODE_DOCUMENT, FunctionHistories
from pilotflame.runtime.node.scaling.idle_distribution import Prior
from pilotflame.runtime.node.scaling.keep_alive import History
from pilotflame.runtime.node.scaling.ladder import BurstWait
from pilotflame.runtime.node.scaling.measured_ladder import LadderSpec
from pilotflame.runtime.node.scaling.rung_figures import RungFigures
from pilotflame.runtime.node.scaling.slow_share import SlowShare
from pilotflame.runtime.node.scaling.upstream import BOUNDS_S, Delays

pytestmark = pytest.mark.asyncio

WAITS = (BurstWait(0.0, 2), BurstWait(0.1, 2), BurstWait(0.5, 1))
KNOWN = History((1.5, 2.5), (3.0, 4.0), WAITS, 2, (1.0, 2.0, 3.0, 4.0, 5.0))
FIGURES = RungFigures({RungName.READY: 5e8}, {RungName.LOCAL: (0.5, 0.6)}, 0.4, devices=0.5)

SLOW = SlowShare(3.5, 2.0, 1.5, 80.0)
PAIRS = {"before": Delays(3.5, [0.5] * len(BOUNDS_S))}


def account(function: str) -> Account:
    return Account(function, Prices())


async def test_what_is_known_of_a_function_is_the_same_after_it_was_written(tmp_path: Path):
    async with BackgroundTasks() as tasks:
        histories = await FunctionHistories.open(FileDocuments(tmp_path), tasks, account)
        first = await histories.of("one")
        assert await histories.of("one") is first
        first.ladder.past.history = KNOWN
        first.ladder.measured.figures, first.ladder.measured.slow_share = FIGURES, SLOW
        first.ladder.watch.resume(time.monotonic() - 100.0, 7.0)
        first.upstreams.update(PAIRS)
        await histories.close()
        again = await (await FunctionHistories.open(FileDocuments(tmp_path), tasks, account)).of("one")
    assert again.ladder.past.history == KNOWN
    assert again.ladder.measured.figures == FIGURES
    assert again.upstreams == PAIRS
    assert again.ladder.measured.slow_share == SLOW
    # The idle period goes on after the restart, measured by the wall clock.
    period = again.ladder.watch.period
    assert period is not None
    assert 100.0 <= time.monotonic() - period.begun_s < 160.0
    assert period.since_s == pytest.approx(7.0)


async def test_a_file_of_a_thousand_idle_times_is_small_and_one_with_fewer_is_still_read(tmp_path: Path):
    rnd = random.Random(1)
    times_s = tuple(rnd.expovariate(1 / 300) for _ in range(1024))
    for known in (1024, 256):
        file = tmp_path / str(known) / "habits" / "functions" / "one.json"
        async with BackgroundTasks() as tasks:
            histories = await FunctionHistories.open(FileDocuments(tmp_path / str(known)), tasks, account)
            kept = History(times_s[:known], times_s[:128], WAITS, known)
            ladder = (await histories.of("one")).ladder
            ladder.past.history = kept
            ladder.measured.figures = FIGURES
            await histories.close()
            again = await (
                await FunctionHistories.open(FileDocuments(tmp_path / str(known)), tasks, account)
            ).of("one")
        assert again.ladder.past.history.idles == pytest.approx(times_s[:known], abs=0.001)
        assert file.stat().st_size < 16_000


async def test_a_forgotten_function_is_not_written_again(tmp_path: Path):
    async with BackgroundTasks() as tasks:
        histories = await FunctionHistories.open(FileDocuments(tmp_path), tasks, account)
        (await histories.of("one")).ladder.past.history = KNOWN
        await histories.close()
        file = tmp_path / "habits" / "functions" / "one.json"
        assert json.loads(file.read_text())["periods"] == 2
        await histories.forget("one")
        await histories.close()
        assert not file.exists()
        assert (await histories.of("one")).ladder.past.history == History()


@pytest.mark.parametrize(
    "damage", ["", "{", "[1]", '{"periods": -1}', '{"idles": [1e999]}', '{"idles": [-1]}', '{"bills": []}',
               '{"burst_waits": [[1, 1], [2, 1], [3, 1], [4, 1], [5, 1], [6, 1], [7, 1]]}', '{"burst_waits": [[1, -1]]}', '{"held_bytes": {"cellar": 1}}', '{"weights": [1]}',
               '{"slow_share": {"doublings": 21}}', '{"slow_share": {"burst": 0}}', '{"upstreams": {"../a": {"calls": 1, "hits": []}}}', '{"upstreams": {"a": {"calls": 1, "hits": [1]}}}'],
)  # fmt: skip
async def test_a_damaged_file_counts_as_empty(tmp_path: Path, damage: str):
    (tmp_path / "habits" / "functions").mkdir(parents=True)
    for file in (tmp_path / NODE_DOCUMENT, tmp_path / "habits" / "functions" / "one.json"):
        file.write_text(damage)
    async with BackgroundTasks() as tasks:
        histories = await FunctionHistories.open(FileDocuments(tmp_path), tasks, account)
        assert (await histories.of("one")).ladder.past.history == History()
        await histories.close()
    assert Prior(tuple(json.loads((tmp_path / NODE_DOCUMENT).read_text())["weights"])) == Prior()


async def test_a_disk_that_takes_nothing_costs_the_memory_nothing(tmp_path: Path):
    (tmp_path / "habits").write_text("a file where the folder should be")
    async with BackgroundTasks() as tasks:
        histories = await FunctionHistories.open(FileDocuments(tmp_path), tasks, account)
        one = await histories.of("one")
        one.ladder.past.history = KNOWN
        await histories.close()
        assert (await histories.of("one")).ladder.past.history == KNOWN
        assert not tasks.failures


async def test_what_has_changed_is_written_a_while_later(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("pilotflame.runtime.node.reconciling.function_histories.WRITE_AFTER_S", 0.0)
    file = tmp_path / "habits" / "functions" / "one.json"
    async with BackgroundTasks() as tasks:
        ladder = (
            await (await FunctionHistories.open(FileDocuments(tmp_path), tasks, account)).of("one")
        ).ladder
        ladder.watch.resume(time.monotonic() - 5.0, 0.0)
        async with asyncio.timeout(20):
            await ladder.adopt(_Nothing(), LadderSpec(), 0.0, tasks)
            while not file.exists():
                await asyncio.sleep(0.005)
        assert json.loads(file.read_text())["idling"]["since_at"] <= time.time() - 5.0


class _Nothing:
    """A revision that holds nothing and is never called."""

    rung = RungName.LOCAL
    arrived, slow = 0, (0, 0)
    warm_until_s = None

    def scale(self) -> None:
        """Do nothing."""


async def test_requests_go_on_while_the_histories_of_many_functions_are_gathered(tmp_path: Path, monkeypatch):
    turn, gathered_in, remembering = 0, list[int](), function_histories._remembering

    async def request() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(
        function_histories, "_remembering", lambda known: gathered_in.append(turn) or remembering(known)
    )
    async with BackgroundTasks() as tasks:
        histories = await FunctionHistories.open(FileDocuments(tmp_path), tasks, account)
        for number in range(20):
            await histories.of(f"f{number}")
        task = asyncio.create_task(request())
        await histories.close()
        task.cancel()
    assert len(set(gathered_in)) == 20
    assert len(list((tmp_path / "habits" / "functions").iterdir())) == 20
