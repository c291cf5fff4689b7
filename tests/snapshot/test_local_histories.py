"""Random histories of local weights: each answer has the bytes of its deploy, or an error names the file and the remedy.

A worker maps the shards, or copies them to a simulated device, parks and wakes. Before, the deploy and the zygote have compared
the shards with the manifest.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.errors import SnapshotChanged, SnapshotError
from pilotflame.runtime.ground.access.deploy_policy import ALL_ALLOWED
from pilotflame.runtime.ground.settings.function_settings import SnapshotPart
from pilotflame.runtime.node.packaging.snapshots import (
    MANIFEST_FILE,
    SourceRules,
    describe_local,
    read_versions,
)
from pilotflame.snapshot.format.compared import REMEDY, ComparedShards
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest
from pilotflame.snapshot.handle import Snapshot
from pilotflame.snapshot.named import Snapshots
from simulated_device import SIMULATED

FILE, COUNT = "model.safetensors", 3000
OTHER_BYTES = "an answer has other bytes than its deploy"
CHANGES = ("in place", "other size", "rename over", "link", "truncate", "touch", "put back", "stale manifest")
MOVES = ("deploy", "rollback", "zygote gone", "worker gone", "park", "call", "call", "age")
STEPS = st.lists(st.tuples(st.sampled_from((*CHANGES, *MOVES)), st.booleans()), min_size=4, max_size=16)


def packed(first: str, second: str, value: float, count: int = COUNT) -> bytes:
    size = 4 * count
    header = "{" + ",".join(
        f'"{name}":{{"dtype":"F32","shape":[{count}],"data_offsets":[{at * size},{(at + 1) * size}]}}'
        for at, name in enumerate((first, second))
    )
    text = (header + "}").encode()
    text += b" " * (-len(text) % 8)
    data = struct.pack("<f", value) * count + struct.pack("<f", value + 1) * count
    return len(text).to_bytes(8, "little") + text + data


class World:
    """A folder of weights, the revisions that were deployed with it, and the worker of the live one."""

    def __init__(self, folder: Path) -> None:
        self.root, self.revisions = folder / "weights", folder / "revisions"
        self.root.mkdir()
        self.revisions.mkdir()
        self.file, self.numbers = self.root / FILE, itertools.count(1)
        self.file.write_bytes(packed("a", "b", 0.0))
        # The folder of each revision, and the bytes with which it was deployed.
        self.deployed: list[tuple[Path, bytes]] = []
        self.live: tuple[Path, bytes] | None = None
        self.zygote: Mapping[str, str] | None = None
        self.worker: tuple[Snapshots, Mapping[str, torch.Tensor]] | None = None
        self.answers = self.refusals = 0
        self.deploy()

    def content(self, *, other: bool) -> bytes:
        names = ("b", "a") if other else ("a", "b")
        return packed(*names, float(next(self.numbers)))

    def change(self, how: str, *, other: bool) -> None:
        if how == "in place":
            with self.file.open("r+b") as file:
                file.write(self.content(other=other))
                file.truncate()
        elif how == "other size":
            self.file.write_bytes(packed("a", "b", 1.0, COUNT + (8 if other else -8)))
        elif how in {"rename over", "link"}:
            new = self.root / f"new{next(self.numbers)}"
            new.write_bytes(self.content(other=other))
            if how == "link":
                (link := new.with_suffix(".link")).symlink_to(new.name)
                link.rename(self.file)
            else:
                new.rename(self.file)
        elif how == "truncate":
            os.truncate(self.file, min(self.file.stat().st_size, 5000 if other else 4))
        elif how == "touch":
            self.file.touch()
        elif how == "put back" and self.live is not None:
            self.file.write_bytes(self.live[1])
        elif how == "stale manifest":
            (self.root / MANIFEST_NAME).unlink(missing_ok=True)
            with contextlib.suppress(SnapshotError):
                if other:
                    create(self.file).write(self.root / MANIFEST_NAME)

    def deploy(self) -> None:
        folder = self.revisions / f"r{next(self.numbers)}"
        folder.mkdir()
        earlier = self.live[0] if self.live is not None else None
        rules = SourceRules({}, ALL_ALLOWED, "")
        content = self.file.read_bytes()
        describe_local(
            self.root, folder, SnapshotPart(), lambda _: None, rules, earlier=earlier, stored=False
        )
        self.deployed.append((folder, content))
        self.turn(-1)

    def turn(self, number: int) -> None:
        self.live, self.zygote, self.worker = self.deployed[number], None, None

    def snapshot(self, versions: Mapping[str, str]) -> Snapshot:
        assert self.live is not None
        return Snapshot(self.root, Manifest.read(self.live[0] / MANIFEST_FILE), versions=dict(versions))

    def start(self, *, on_device: bool) -> tuple[Snapshots, Mapping[str, torch.Tensor]]:
        assert self.live is not None
        if self.zygote is None:
            built = self.snapshot(read_versions(self.live[0]))
            built.check()
            assert built._stored.compared is not None
            self.zygote = built._stored.compared.versions
        snapshot = self.snapshot(self.zygote)
        module = torch.nn.Module()
        if on_device:
            for one in snapshot.manifest.tensors:
                module.register_buffer(one.name, torch.empty(one.shape, device="meta"))
            snapshot.restore(module, device=SIMULATED)
        snapshot.open()
        tensors = dict(module.named_buffers()) if on_device else snapshot.load("*")
        snapshot.wait(20)
        return Snapshots([snapshot]), tensors

    def call(self, *, on_device: bool) -> None:
        assert self.live is not None
        try:
            if self.worker is None:
                self.worker = self.start(on_device=on_device)
            snapshots, tensors = self.worker
            snapshots.unpark()
            snapshots.wait(20)
            snapshots.check()
            found = {name: tensor.clone().numpy().tobytes() for name, tensor in tensors.items()}
            snapshots.check()
        except SnapshotChanged as error:
            refused = (FILE in error.message, error.remedy)
            self.worker = None
            self.refusals += 1
        else:
            begin = 8 + int.from_bytes(self.live[1][:8], "little")
            data = self.live[1][begin:]
            order = sorted(found, key=lambda name: self.live[1].index(f'"{name}"'.encode()))  # type: ignore[index]
            # Not `==`: where CI is set, pytest describes the difference, and takes minutes for bytes.
            if b"".join(found[name] for name in order) != data:
                raise AssertionError(OTHER_BYTES)
            self.answers += 1
            return
        assert refused == (True, REMEDY)

    def step(self, what: str, *, other: bool) -> None:
        if what in CHANGES:
            self.change(what, other=other)
        elif what == "deploy":
            # Damaged weights, or a manifest of other bytes, are refused.
            with contextlib.suppress(SnapshotError):
                self.deploy()
        elif what == "rollback":
            self.turn(-2 if other and len(self.deployed) > 1 else 0)
        elif what == "zygote gone":
            self.zygote = self.worker = None
        elif what == "worker gone":
            self.worker = None
        elif what == "park" and self.worker is not None:
            self.worker[0].park()
        elif what == "call":
            self.call(on_device=other)
        elif what == "age":
            # Wait longer than a tick of the clock of file times. So the next write changes the times.
            time.sleep(0.025)


def play(steps: list[tuple[str, bool]]) -> World:
    # In memory, nothing waits for a disk.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="pilotflame-test-") as folder:
        world = World(Path(folder))
        for what, other in [*steps, ("call", False), ("zygote gone", False), ("call", True)]:
            world.step(what, other=other)
        return world


@settings(max_examples=15)
@given(STEPS)
def test_each_answer_has_the_bytes_of_its_deploy(steps: list[tuple[str, bool]]) -> None:
    play(steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=1000)
@given(STEPS)
def test_each_answer_has_the_bytes_of_its_deploy_in_long(steps: list[tuple[str, bool]]) -> None:
    play(steps)


def test_histories_have_answers_and_refusals() -> None:
    """Without changes, each call is answered. In the second history, the call is refused while the file has other bytes."""
    world = play([("call", True), ("park", False), ("call", True), ("age", False), ("call", False)])
    assert (world.answers, world.refusals) == (5, 0)
    world = play([("age", False), ("call", False), ("in place", True), ("call", False), ("put back", False)])
    assert (world.answers, world.refusals) == (3, 1)


@pytest.mark.parametrize(
    "steps",
    [
        [("call", False), ("in place", True)],
        [("call", True), ("park", False), ("in place", True)],
        [("rename over", True), ("worker gone", False)],
        [("in place", True), ("deploy", False), ("rollback", False)],
    ],
    ids=["mapped", "parked", "replaced", "rolled back"],
)
def test_these_tests_can_fail(steps: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*_: Any) -> None:
        """Compare nothing, as if the check were taken out."""

    monkeypatch.setattr(ComparedShards, "compare", compare)
    monkeypatch.setattr(ComparedShards, "check", compare)
    with pytest.raises(AssertionError, match=OTHER_BYTES):
        play([*steps, ("age", False)])
