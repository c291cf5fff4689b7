"""Weights that several revisions contain are on disk once, and are removed with the last of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pilotflame.runtime.node.functions.shared_weights import MIN_BYTES, SharedWeights

WEIGHTS = b"w" * MIN_BYTES


def staged(root: Path, name: str, files: dict[str, bytes]) -> Path:
    code = root / name / "code"
    for file, content in files.items():
        (code / file).parent.mkdir(parents=True, exist_ok=True)
        (code / file).write_bytes(content)
    return code


@pytest.fixture
def weights(tmp_path: Path) -> SharedWeights:
    return SharedWeights(tmp_path / "weights")


def test_equal_weights_are_one_file_whatever_their_name(weights: SharedWeights, tmp_path: Path):
    one = staged(tmp_path, "one", {"a.safetensors": WEIGHTS})
    two = staged(tmp_path, "two", {"deep/b.bin": WEIGHTS, "c.bin": WEIGHTS[:-1] + b"x"})
    weights.share(one, [])
    weights.share(two, [])
    assert (one / "a.safetensors").samefile(two / "deep/b.bin")
    assert not (one / "a.safetensors").samefile(two / "c.bin")
    assert (two / "deep/b.bin").read_bytes() == WEIGHTS
    assert sorted(path.name for path in two.iterdir()) == ["c.bin", "deep"]


def test_a_shared_file_cannot_be_changed_in_place(weights: SharedWeights, tmp_path: Path):
    code = staged(tmp_path, "one", {"a.bin": WEIGHTS})
    weights.share(code, [])
    assert (code / "a.bin").stat().st_mode & 0o222 == 0


def test_only_weights_are_shared(weights: SharedWeights, tmp_path: Path):
    files = {"data.db": WEIGHTS, "small.bin": b"x", "model/vocabulary": WEIGHTS}
    one, two = (staged(tmp_path, name, files) for name in ("one", "two"))
    weights.share(one, [one / "model"])
    weights.share(two, [two / "model"])
    assert (one / "model/vocabulary").samefile(two / "model/vocabulary")
    assert [(code / file).stat().st_nlink for code in (one, two) for file in ("data.db", "small.bin")] == [
        1
    ] * 4


def test_weights_go_with_their_last_revision(weights: SharedWeights, tmp_path: Path):
    one, two = (staged(tmp_path, name, {"a.bin": WEIGHTS}) for name in ("one", "two"))
    weights.share(one, [])
    weights.share(two, [])
    (one / "a.bin").unlink()
    weights.discard_unused()
    assert len(list((tmp_path / "weights").iterdir())) == 1
    (two / "a.bin").unlink()
    weights.discard_unused()
    assert list((tmp_path / "weights").iterdir()) == []
