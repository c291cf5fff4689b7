"""A function's workers compute a snapshot once, whatever happens to the worker that computes. Processes and kills are real."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from pilotflame.errors import CacheError, SnapshotChanged, SnapshotError, StorageFull
from pilotflame.snapshot.computed import ComputedSnapshots
from pilotflame.snapshot.format.manifest import MANIFEST_NAME
from safetensors.torch import save_file

FILE, ASSET = "a.safetensors", "a.json"
MANY = 1 << 30


def numbers(folder: Path, value: float = 1.0, count: int = 1024) -> None:
    save_file({"a": torch.full((count,), value)}, folder / FILE)
    (folder / ASSET).write_text("names")


def refused(_: Path) -> None:
    raise AssertionError("it is there")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


def test_it_is_computed_once(tmp_path: Path) -> None:
    kept = ComputedSnapshots(tmp_path / "of" / "function", MANY)
    assert kept.open("one", numbers).load("a")["a"].sum() == 1024
    again = ComputedSnapshots(kept.folder, MANY).open("one", refused)
    assert again.load("a")["a"].sum() == 1024
    assert kept.folder.stat().st_mode & 0o077 == 0


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    kept = ComputedSnapshots(tmp_path, MANY)

    def fails(folder: Path) -> None:
        numbers(folder)
        raise SnapshotError("no")

    with pytest.raises(SnapshotError, match="no"):
        kept.open("one", fails)
    assert names(tmp_path) == set()
    with pytest.raises(SnapshotError):
        kept.open("one", lambda folder: None)
    assert names(tmp_path) == set()
    kept.open("one", numbers)


def flip(file: Path) -> None:
    """Change the last byte of a file, and keep its times, as a fault of the disk does."""
    facts, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def other_dtype(manifest: Path) -> None:
    manifest.write_text(manifest.read_text().replace('"dtype":"F32"', '"dtype":"I32"'))


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    (FILE, lambda file: os.truncate(file, 100)),
    (FILE, flip),
    (ASSET, flip),
    (ASSET, lambda file: os.truncate(file, 0)),
    (ASSET, Path.unlink),
    (MANIFEST_NAME, Path.unlink),
    (MANIFEST_NAME, other_dtype),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_one_is_computed_again(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    ComputedSnapshots(tmp_path, MANY).open("one", numbers)
    ComputedSnapshots(tmp_path, MANY).open("one", refused)
    damage(tmp_path / "one" / name)
    found = ComputedSnapshots(tmp_path, MANY).open("one", numbers)
    assert found.load("a")["a"].sum() == 1024
    assert (found.path / ASSET).read_text() == "names"


def test_a_write_to_a_mapped_one_is_noticed_and_it_is_computed_again(tmp_path: Path) -> None:
    kept = ComputedSnapshots(tmp_path, MANY)
    kept.open("one", numbers).load("a")
    kept.check()
    flip(tmp_path / "one" / FILE)
    with pytest.raises(SnapshotChanged, match=FILE):
        kept.check()
    assert kept.open("one", numbers).load("a")["a"].sum() == 1024


def test_a_zygote_reads_the_bytes_once(tmp_path: Path) -> None:
    ComputedSnapshots(tmp_path, 1 << 40).open("one", lambda folder: numbers(folder, count=16 << 20))
    kept = ComputedSnapshots(tmp_path, 1 << 40)
    begins = [time.process_time()]
    for _ in range(3):
        kept.open("one", refused)
        begins.append(time.process_time())
    first, *others = (end - begin for begin, end in pairwise(begins))
    assert max(others) < first / 2


def test_the_latest_ones_stay_if_they_fit(tmp_path: Path) -> None:
    kept = ComputedSnapshots(tmp_path, MANY)
    # A deploy that fails after its computation must not evict the snapshot of a live revision.
    for number, key in enumerate(("live", "fails", "fails again", "next")):
        kept.open(key, numbers)
        os.utime(tmp_path / key, (number, number))
    assert names(tmp_path) == {"live", "fails", "fails again", "next"}
    # Use the first snapshot, so that it counts as the latest.
    held = kept.open("live", refused)
    size = sum(file.stat().st_size for file in (tmp_path / "live").iterdir())
    ComputedSnapshots(tmp_path, 5 * size // 2).open("other", numbers)
    assert names(tmp_path) == {"live", "other"}
    # The snapshot that `held` maps is removed, but its bytes stay mapped.
    ComputedSnapshots(tmp_path, 5000).open("four", numbers)
    assert names(tmp_path) == {"four"}
    assert held.load("a")["a"].sum() == 1024


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SnapshotError, match="cannot be written") as raised:
        ComputedSnapshots(tmp_path / "file" / "below", MANY).open("one", numbers)
    # It is no CacheError, which would mean a failure in the cache of the weights.
    assert type(raised.value) is SnapshotError


@pytest.mark.parametrize(
    "error", [CacheError("of the weights"), StorageFull("of the weights"), TimeoutError("late"), OSError(5, "I/O")]
)  # fmt: skip
def test_an_error_of_the_computation_stays_as_it_is(tmp_path: Path, error: Exception) -> None:
    def fails(_: Path) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        ComputedSnapshots(tmp_path, MANY).open("one", fails)
    assert raised.value is error
    assert names(tmp_path) == set()


def _compute(folder: Path, link: Connection) -> None:
    """Compute a snapshot. In the middle of the computation, send the name of the folder and wait for a message."""

    def half(made: Path) -> None:
        (made / FILE).write_bytes(b"half")
        link.send(made.name)
        link.recv()
        numbers(made)

    ComputedSnapshots(folder, MANY).open("one", half)


def _wait(folder: Path, link: Connection) -> None:
    link.send("waits")
    found = ComputedSnapshots(folder, MANY).open("one", lambda made: numbers(made, 2.0))
    link.send(float(found.load("a")["a"].sum()))


def _start(run: object, folder: Path) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    here, there = multiprocessing.Pipe()
    # Fork this process, as a zygote forks its workers.
    process = multiprocessing.get_context("fork").Process(target=run, args=(folder, there), daemon=True)  # type: ignore[arg-type]
    process.start()
    there.close()
    return process, here


@pytest.mark.parametrize("killed", [True, False])
def test_another_worker_waits_and_computes_only_after_a_kill(tmp_path: Path, killed: bool) -> None:
    first, link = _start(_compute, tmp_path)
    left = link.recv()
    second, other = _start(_wait, tmp_path)
    assert other.recv() == "waits"
    assert names(tmp_path) == {left}
    if killed:
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
    else:
        link.send("go")
    assert other.recv() == (2048 if killed else 1024)
    for process in (first, second):
        process.join(20)
    assert names(tmp_path) == {"one"}
