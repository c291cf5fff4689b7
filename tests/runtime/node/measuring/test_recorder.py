"""Records of functions on disk: they are bounded, readable after a crash, and loaded after a restart."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live import gateway_here, gateway_process, until
from pilotflame.runtime.node.measuring import recorder
from pilotflame.runtime.node.measuring.recorder import BoundedFile, Recorder
from pilotflame.runtime.node.reconciling.function import Function as DeployedFunction

ECHO = "def handler(event):\n    return event\n"


@given(st.lists(st.binary(min_size=1, max_size=6).map(lambda raw: raw.hex().encode() + b"\n"), max_size=60))
def test_a_file_keeps_the_newest_lines_within_its_bound(
    tmp_path_factory: pytest.TempPathFactory, rows: list[bytes]
):
    file = BoundedFile(tmp_path_factory.mktemp("bounded") / "folder" / "rows", 40)
    for row in rows:
        file.append(row)
    kept = file.read()
    assert len(kept) <= 40
    assert b"".join(rows).endswith(kept)
    assert len(kept) >= min(len(b"".join(rows)), 20 - 13)


def test_torn_rows_are_left_out(tmp_path: Path) -> None:
    lines, numbers = BoundedFile(tmp_path / "lines", 1000), BoundedFile(tmp_path / "n", 1000, row_bytes=8)
    for file, row, torn in ((lines, b"[1]\n", b"[2"), (numbers, b"12345678", b"123")):
        file.append(row)
        with (tmp_path / ("lines" if file is lines else "n")).open("ab") as raw:
            raw.write(torn)
        assert file.read() == row
        file.append(row)
    assert lines.read() == b"[1]\n[2\n[1]\n"
    assert numbers.read() == b"1234567812345678"


async def test_records_survive_a_restart_and_a_torn_end_and_go_with_their_function(state: Path):
    begun_at = time.time()
    async with gateway_process(state) as gateway:
        function = await gateway.deploy(ECHO, name="kept")
        for number in range(3):
            assert await function.answer(number) == number
        before = (await gateway.client.get("/v1/functions/kept/decisions")).json()["decisions"]
        assert [one["action"] for one in before][:1] == ["start"]
        arrivals = (await gateway.client.get("/v1/functions/kept/arrivals")).json()["arrivals"]
        assert len(arrivals) == 3
        assert begun_at < arrivals[0] < arrivals[1] < arrivals[2] < time.time()
        assert gateway.process is not None
        gateway.process.kill()
        await gateway.process.wait()
    for file in ("decisions.jsonl", "load.jsonl", "arrivals.f64"):
        with (state / "records" / "kept" / file).open("ab") as raw:
            raw.write(b"[17")
    async with gateway_here(state) as gateway:
        await gateway.function("kept").answer()
        after = (await gateway.client.get("/v1/functions/kept/decisions")).json()["decisions"]
        assert after[: len(before)] == before
        assert len(after) > len(before)
        assert len((await gateway.client.get("/v1/functions/kept/arrivals")).json()["arrivals"]) == 4
        await gateway.client.delete("/v1/functions/kept")

        async def gone() -> bool:
            return not (state / "records" / "kept").exists()

        await until(gone, "the records of a deleted function go")


async def test_only_functions_with_news_are_asked_and_written(state: Path, monkeypatch: pytest.MonkeyPatch):
    # Disable the gateway's own recorder, which would take the rows first.
    monkeypatch.setattr(recorder, "WRITE_EVERY_S", 1e6)
    taken, take = list[DeployedFunction](), recorder._take
    monkeypatch.setattr(
        recorder, "_take", lambda history, now_s: taken.append(history) or take(history, now_s)
    )
    async with gateway_here(state) as gateway:
        functions = gateway.server.functions
        beside = Recorder(state / "beside", functions.all)
        functions.events.processes.append(beside.note_change)
        for name in ("called", "quiet"):
            function = await gateway.deploy(ECHO, {"scale.idle_timeout_s": 0}, name=name)
            await function.settled(standby=True)
        await beside.flush()
        await gateway.function("called").answer()
        await gateway.function("called").settled(standby=True)
        taken.clear()
        await beside.flush()
        assert taken == [functions.get("called").function]
        await beside.flush()
        assert len(taken) == 1
    assert (state / "beside" / "called" / "arrivals.f64").stat().st_size == 8


async def test_a_gateway_that_ends_writes_what_it_knows(state: Path):
    async with gateway_here(state) as gateway:
        await (await gateway.deploy(ECHO, name="ended")).answer()
        assert not (state / "records").exists()
    assert b"start" in await asyncio.to_thread((state / "records" / "ended" / "decisions.jsonl").read_bytes)
    assert await asyncio.to_thread((state / "records" / "ended" / "arrivals.f64").stat)
