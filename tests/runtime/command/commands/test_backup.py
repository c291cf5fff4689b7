"""`pilotflame backup` of a gateway that serves, and `restore` into another state folder."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import gateway_process, short_folder
from pilotflame.runtime.cli import main
from pilotflame.runtime.command.commands.backup import ATTEMPTS, _link
from pilotflame.runtime.jobs.stored.large_bodies import MOST_INLINE_BYTES
from pilotflame.runtime.node.packaging.code import pack

Run = Callable[..., Any]
TOKEN = "import os\ndef handler(event):\n    return os.environ.get('TOKEN')\n"
ECHO = "def handler(event):\n    return event\n"


async def command(*words: object) -> int:
    return await asyncio.to_thread(main, [str(word) for word in words])


async def test_a_backup_under_load_has_all_that_was_acknowledged(state: Path, tmp_path: Path):
    file = tmp_path / "backup.tar.gz"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.bin").write_bytes(b"w" * (2 << 20))
    acknowledged: list[str] = []
    async with gateway_process(state) as gateway:
        function = await gateway.deploy(TOKEN, name="guarded")
        await gateway.deploy(ECHO, name="echo")
        await gateway.client.put("/v1/functions/guarded/secrets/TOKEN", json={"value": "kept"})
        for number in (1, 2):
            (tmp_path / "model" / "handler.py").write_text(f"def handler(event):\n    return {number}")
            gzip = {"Content-Type": "application/gzip"}
            params = {"set": "name=heavy"}
            answer = await gateway.client.post(
                "/v1/functions", content=pack(tmp_path / "model"), headers=gzip, params=params
            )
            assert answer.status_code == 201, answer.text
        backed_up = asyncio.Event()

        async def submit(padding: str) -> None:
            while not backed_up.is_set():
                response = await gateway.client.post(
                    "/v2/echo/run", json={"input": [len(acknowledged), padding]}
                )
                acknowledged.append(response.json()["id"])

        async def redeploy() -> None:
            while not backed_up.is_set():
                await gateway.deploy(ECHO, name="changing")
                await gateway.client.delete("/v1/functions/changing")

        async with asyncio.TaskGroup() as busy:
            for size in (0, 0, 0, MOST_INLINE_BYTES):
                busy.create_task(submit("x" * size))
            busy.create_task(redeploy())
            while len(acknowledged) < 20:
                await function.answer()
            before = list(acknowledged)
            assert await command("backup", file, "--state-dir", state) == 0
            assert await command("backup", file, "--state-dir", state) == 0
            backed_up.set()
        assert not list((state / "staging").glob("backup.*"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with short_folder() as folder:
        assert await command("restore", file, "--state-dir", folder / "state") == 0
        copies = list((folder / "state" / "functions" / "heavy").glob("r*/code/model.bin"))
        assert len({path.stat().st_ino for path in copies}) == 1
        assert {stat.S_IMODE(path.stat().st_mode) for path in copies} == {0o444}
        async with gateway_process(folder / "state") as gateway:
            assert await gateway.function("guarded").answer() == "kept"
            assert await gateway.function("heavy").answer() == 2
            assert (await gateway.client.get("/v1/functions/guarded/secrets")).json()["secrets"] == ["TOKEN"]
            for job in before:
                assert (await gateway.client.get(f"/v2/echo/status/{job}")).status_code == 200
        assert await command("restore", file, "--state-dir", folder / "state") == 1
        (folder / "empty").mkdir()
        assert await command("restore", file, "--state-dir", folder / "empty") == 0
        assert stat.S_IMODE((folder / "empty").stat().st_mode) == 0o700


async def test_a_backup_has_what_was_decided_and_used(state: Path, tmp_path: Path):
    file = tmp_path / "backup.tar.gz"
    found: dict[str, Any] = {}

    async def histories(client: httpx.AsyncClient) -> dict[str, Any]:
        decisions = (await client.get("/v1/functions/kept/decisions")).json()["decisions"]
        arrivals = (await client.get("/v1/functions/kept/arrivals")).json()["arrivals"]
        samples = (await client.get("/v1/functions/kept/load")).json()["samples"]
        return {"decisions": decisions, "arrivals": arrivals, "samples": len(samples)}

    async with gateway_process(state) as gateway:
        function = await gateway.deploy(ECHO, name="kept")
        await function.answer(1)
        found = await histories(gateway.client)
        # The gateway writes all rows before the histories are read. So the backup has all rows.
        assert await command("backup", file, "--state-dir", state) == 0
    with short_folder() as folder:
        # The command makes missing folders.
        assert await command("restore", file, "--state-dir", folder / "new" / "state") == 0
        async with gateway_process(folder / "new" / "state") as gateway:
            restored = await histories(gateway.client)
    assert len(found["arrivals"]) == 1
    assert [one["action"] for one in found["decisions"]][:1] == ["start"]
    assert restored["arrivals"] == found["arrivals"]
    assert restored["decisions"][: len(found["decisions"])] == found["decisions"]
    assert restored["samples"] >= found["samples"] > 0


def test_what_is_in_a_database_is_not_backed_up(run: Run, tmp_path: Path):
    address = {"PILOTFLAME_DATABASE": "postgresql://pilotflame:hidden@db.internal/pilotflame"}
    done = run("backup", tmp_path / "backup.tar.gz", "--state-dir", tmp_path, **address)
    assert done.returncode == 1
    assert "pg_dump" in done.stderr
    assert "hidden" not in done.stderr


def test_what_is_not_a_backup_is_refused_and_leaves_nothing(run: Run, tmp_path: Path):
    (tmp_path / "text").write_text("x")
    with tarfile.open(tmp_path / "other.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "text", "text")
    newer = tmp_path / "pilotflame-backup.json"
    newer.write_text(json.dumps({"format": 99, "version": "9.9"}))
    with tarfile.open(tmp_path / "newer.tar.gz", "w:gz") as tar:
        tar.add(newer, newer.name)
    here = sorted(path.name for path in tmp_path.iterdir())
    for name, said in (
        ("text", "not a complete backup"),
        ("other.tar.gz", "is not a backup"),
        ("newer.tar.gz", "9.9"),
        ("none", "No such file"),
    ):
        done = run("restore", tmp_path / name, "--state-dir", tmp_path / "state")
        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
    done = run("backup", tmp_path / "b.tar.gz", "--state-dir", tmp_path / "nowhere")
    assert "is not a gateway's state folder" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == here


@pytest.mark.parametrize("cut", [100, 3000])
def test_a_truncated_backup_is_refused(run: Run, tmp_path: Path, cut: int):
    (tmp_path / "state" / "functions").mkdir(parents=True)
    (tmp_path / "state" / "noise").write_bytes(bytes(range(256)) * 4096)
    assert run("backup", tmp_path / "whole", "--state-dir", tmp_path / "state").returncode == 0
    (tmp_path / "half").write_bytes((tmp_path / "whole").read_bytes()[:-cut])
    done = run("restore", tmp_path / "half", "--state-dir", tmp_path / "restored")
    assert "not a complete backup" in done.stderr
    assert not (tmp_path / "restored").exists()


@pytest.mark.parametrize("failures", [0, 1, ATTEMPTS - 1, ATTEMPTS])
@pytest.mark.parametrize("gone", [False, True])
def test_a_folder_whose_files_vanish_meanwhile_is_linked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, gone: bool
):
    (source := tmp_path / "source").mkdir()
    (source / "file").write_text("1")
    real, left = os.link, [FileNotFoundError("vanished")] * failures

    def vanishing(*paths: Any) -> None:
        if left:
            if gone:
                source.rename(tmp_path / "deleted")
            raise left.pop()
        real(*paths)

    monkeypatch.setattr(os, "link", vanishing)
    if failures == ATTEMPTS and not gone:
        with pytest.raises(Exception, match="vanished"):
            _link(source, tmp_path / "copy")
        return
    _link(source, tmp_path / "copy")
    # A folder that was deleted meanwhile is left out.
    assert (tmp_path / "copy" / "file").exists() is not (gone and failures > 0)


def test_files_are_copied_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(*_paths: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    (tmp_path / "file").write_text("1")
    monkeypatch.setattr(os, "link", refused)
    _link(tmp_path / "file", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "1"
