"""What the gateway logs of a full disk: one line when it becomes full, and one when it has room again."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from live import Gateway, gateway_here, until
from pilotflame.runtime.ground.telemetry import disk as disk_module
from pilotflame.runtime.ground.telemetry.disk import PAUSE_S, Disk
from pilotflame.runtime.startup import state as startup_state


async def said(gateway: Gateway) -> list[tuple[str, str]]:
    """Return level and text of the lines about the disk."""
    lines = map(json.loads, (await gateway.client.get("/v1/logs/gateway")).text.splitlines())
    return [(line["level"], line["text"]) for line in lines if "the disk of" in line["text"]]


async def test_a_full_disk_is_logged_once_and_its_end_by_the_next_write(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = False
    monkeypatch.setattr(startup_state, "is_disk_full", lambda _folder: full)
    monkeypatch.setattr(disk_module, "PAUSE_S", 0.0)
    async with gateway_here(state) as gateway:
        assert (await gateway.client.get("/readyz")).status_code == 200
        full = True
        for _ in range(3):
            assert (await gateway.client.get("/readyz")).status_code == 503
            await gateway.client.get("/metrics")
        ((level, text),) = await said(gateway)
        assert level == "error"
        assert f"the disk of {state} is full" in text
        full = False
        # No request asks for the disk's state. The gateway notices the free space when it writes the next line.
        logging.getLogger("pilotflame").warning("a line")

        async def resolved() -> bool:
            return len(await said(gateway)) == 2

        await until(resolved, "the line that the disk has room again")
        assert (await said(gateway))[1][0] == "warning"
        assert (await gateway.client.get("/readyz")).status_code == 200


async def test_a_disk_that_is_full_by_turns_fills_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now_s, looks = 0.0, 0

    def by_turns() -> bool:
        nonlocal looks
        looks += 1
        return looks % 2 == 1

    disk = Disk(tmp_path, by_turns, lambda: now_s)
    caplog.set_level(logging.INFO)
    for _ in range(200):
        disk.look()
        now_s += 1.0
    assert 2 <= len(caplog.records) <= 200 / PAUSE_S + 1
    # The messages alternate, also where changes between them were not logged.
    assert [record.levelname for record in caplog.records] == (["ERROR", "WARNING"] * 3)[
        : len(caplog.records)
    ]


async def test_writes_look_only_if_they_contradict_what_is_known(tmp_path: Path) -> None:
    looks = 0

    def never() -> bool:
        nonlocal looks
        looks += 1
        return False

    disk = Disk(tmp_path, never)
    disk.wrote(False)
    assert looks == 0
    disk.wrote(True)
    assert (looks, disk.full) == (1, False)
