"""Sequences whose beginnings are stored have the same tokens as sequences without stored prefixes.
Models, snapshots and mappings are real.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from pilotflame.errors import SnapshotError
from pilotflame.handlers.language_model.causal_model import CausalModel
from pilotflame.handlers.language_model.engine import Engine
from pilotflame.handlers.language_model.prefixes import FILE, TENSORS, Prefix, Prefixes, write
from pilotflame.handlers.language_model.schedule import ChunkTimes
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.handle import Snapshot
from tiny_causal import KINDS, generated, tiny

from .test_engine import prompts, tokens

BEGINNINGS = [Prefix("short", (5, 6, 7)), Prefix("long", tuple(range(3, 43)))]
ORIGIN = {"weights": "abc"}


def stored(kind: str, folder: Path) -> tuple[CausalModel, Prefixes]:
    """Return a model and its opened prefixes."""
    module = tiny(kind)
    model = CausalModel(module, module.config)
    write(model, BEGINNINGS, ORIGIN, folder)
    snapshot = Snapshot(folder, create(folder))
    found = Prefixes(snapshot)
    found.read(ORIGIN)
    snapshot.open()
    return model, found


@pytest.mark.parametrize("kind", KINDS)
async def test_the_tokens_after_a_stored_prefix(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChunkTimes, "tokens_within", lambda *_: 7)
    model, prefixes = stored(kind, tmp_path)
    engine = Engine(model, 4, 400, prefixes)
    # Rows with and without a prefix, and a window so small that some rows are computed again.
    rests = prompts(8, 30)
    given = [
        [*BEGINNINGS[number % 3].ids, *rest] if number % 3 < 2 else rest for number, rest in enumerate(rests)
    ]
    found = await asyncio.gather(*(tokens(engine, one, 12) for one in given))
    assert found == [generated(model.module, one, 12) for one in given]  # type: ignore[arg-type]


def test_the_longest_prefix_counts(tmp_path: Path) -> None:
    _, prefixes = stored("llama", tmp_path)
    short, long = (list(prefix.ids) for prefix in BEGINNINGS)
    assert prefixes.longest([*long, 1]) == BEGINNINGS[1]
    # At least one token of the prompt must follow the prefix.
    assert prefixes.longest(long) is None
    assert prefixes.longest([*short, 1]) == BEGINNINGS[0]
    assert prefixes.longest([1, *short]) is None


def test_the_bytes_are_mapped_and_not_copied(tmp_path: Path) -> None:
    model, prefixes = stored("llama", tmp_path)
    # Write the pages to the disk, because unwritten pages count as dirty.
    os.sync()
    rows = model.new_rows(64)
    rows.lengths = [0]
    prefixes.fill(rows, BEGINNINGS[1])
    pages = [
        text
        for text in Path("/proc/self/smaps").read_text().split("VmFlags:")
        if "prefixes.safetensors" in text
    ]
    assert pages
    assert all("Private_Dirty:         0 kB" in text for text in pages)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace("abc", "abd"), "weights differ"),
        (lambda text: "{", "no valid"),
        (lambda text: "[]", "no valid"),
        (lambda text: json.dumps({"origin": ORIGIN, "layers": 3, "prefixes": {"a": 7}}), "no valid"),
    ],
)  # fmt: skip
def test_prefixes_that_cannot_be_used(tmp_path: Path, change: object, told: str) -> None:
    _, prefixes = stored("llama", tmp_path)
    file = tmp_path / FILE
    file.write_text(change(file.read_text()))  # type: ignore[operator]
    with pytest.raises(SnapshotError, match=told):
        prefixes.read(ORIGIN)


def test_a_model_with_a_state_has_no_prefixes(tmp_path: Path) -> None:
    model = CausalModel(tiny("llama"), tiny("llama").config)
    model.why_alone = "its layers of type conv keep a state"
    with pytest.raises(SnapshotError, match="type conv"):
        write(model, BEGINNINGS, ORIGIN, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    model = CausalModel(tiny("llama"), tiny("llama").config)
    (tmp_path / "file").touch()
    (tmp_path / "taken" / TENSORS).mkdir(parents=True)
    for folder in (tmp_path / "file", tmp_path / "taken"):
        with pytest.raises(SnapshotError, match=f"cannot be written to {folder}"):
            write(model, BEGINNINGS, ORIGIN, folder)


def test_no_prefix_is_computed_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CausalModel(tiny("llama"), tiny("llama").config)
    read: list[int] = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda rows, ids: (read.append(len(ids[0])), forward(rows, ids)))
    with pytest.raises(SnapshotError, match="more than 1 bytes"):
        write(model, BEGINNINGS, ORIGIN, tmp_path / "out", most_bytes=1)
    assert read == [len(BEGINNINGS[0].ids)]
    assert not (tmp_path / "out").exists()
