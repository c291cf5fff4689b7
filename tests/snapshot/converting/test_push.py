"""Pushing: the manifest is sent last, existing files are kept, and another snapshot is not overwritten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pilotflame.errors import CacheError, SnapshotChanged, SnapshotCorrupt, SnapshotError
from pilotflame.snapshot.converting.push import Pushed, push
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, SIGNATURE_NAME, Manifest
from pilotflame.snapshot.format.verify import verify
from pilotflame.snapshot.sources.folder import FolderSource
from safetensors.torch import save_file


class Noting(FolderSource):
    """A folder that records the names put into it, and fails at `fail_at`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.given: list[str] = []
        self.fail_at = ""

    def put(self, name: str, content: Path | bytes, sent: Callable[[int], None] | None = None) -> None:
        if name == self.fail_at:
            raise CacheError("full")
        self.given.append(name)
        super().put(name, content, sent)


def weights(folder: Path, value: float = 1.0) -> tuple[Path, Manifest]:
    folder.mkdir(exist_ok=True)
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text("{}")
    places = {name: f"{name}.safetensors" for name in "ab"}
    save_file({"a": torch.full((5000,), value)}, folder / "a.safetensors")
    save_file({"b": torch.full((3000,), 3.0)}, folder / "b.safetensors")
    index = str({"weight_map": places}).replace("'", '"')
    (folder / "model.safetensors.index.json").write_text(index)
    (folder / "unrelated.bin").write_bytes(b"1")
    return folder, create(folder, chunk_bytes=4096)


NAMES = ["a.safetensors", "b.safetensors", "1_Pooling/config.json", "model.safetensors.index.json"]


@pytest.fixture
def there(tmp_path: Path) -> Noting:
    return Noting(tmp_path / "there" / "deep")


def test_a_signature_is_sent_right_before_the_manifest(tmp_path: Path, there: Noting) -> None:
    folder, _ = weights(tmp_path / "here")
    manifest = create(folder, chunk_bytes=4096, algorithm="sha256")
    (folder / SIGNATURE_NAME).write_bytes(b"a signature")
    push(folder, manifest, there)
    assert there.given == [*NAMES, SIGNATURE_NAME, MANIFEST_NAME]


def test_everything_is_sent_and_the_manifest_last(tmp_path: Path, there: Noting) -> None:
    folder, manifest = weights(tmp_path / "here")
    seen: list[tuple[int, int]] = []
    pushed = push(folder, manifest, there, progress=lambda done, total: seen.append((done, total)))
    total_bytes = manifest.total_bytes + manifest.assets_bytes
    assert there.given == [*NAMES, MANIFEST_NAME]
    assert pushed == Pushed(4, total_bytes, 0, 0)
    assert seen == sorted(seen)
    assert seen[-1] == (total_bytes, total_bytes)
    root = tmp_path / "there" / "deep"
    assert sorted(there.names()) == sorted(there.given)
    assert Manifest.read(root) == manifest
    verify(root, manifest)


def test_what_is_there_is_not_sent_again(tmp_path: Path, there: Noting) -> None:
    folder, manifest = weights(tmp_path / "here")
    push(folder, manifest, there)
    there.given.clear()
    pushed = push(folder, manifest, there)
    assert (pushed.sent_files, pushed.kept_files, there.given) == (0, 4, [])
    touched = manifest.model_copy(update={"first_touch": ("b", "a")})
    push(folder, touched, there)
    assert there.given == [MANIFEST_NAME]
    (tmp_path / "there" / "deep" / "b.safetensors").write_bytes(b"cut")
    (tmp_path / "there" / "deep" / "1_Pooling" / "config.json").unlink()
    there.given.clear()
    push(folder, touched, there)
    assert there.given == ["b.safetensors", "1_Pooling/config.json", MANIFEST_NAME]


def test_a_push_that_broke_off_leaves_no_manifest(tmp_path: Path, there: Noting) -> None:
    folder, manifest = weights(tmp_path / "here")
    there.fail_at = "b.safetensors"
    with pytest.raises(CacheError):
        push(folder, manifest, there)
    assert there.names() == ["a.safetensors"]
    there.fail_at = ""
    push(folder, manifest, there)
    verify(tmp_path / "there" / "deep", Manifest.read(tmp_path / "there" / "deep"))


def test_another_snapshot_is_overwritten_by_force_only(tmp_path: Path, there: Noting) -> None:
    push(*weights(tmp_path / "old"), there)
    folder, manifest = weights(tmp_path / "new", value=2.0)
    there.given.clear()
    with pytest.raises(SnapshotError, match="holds another snapshot") as caught:
        push(folder, manifest, there)
    assert "--force" in caught.value.remedy
    assert there.given == []
    pushed = push(folder, manifest, there, force=True)
    assert there.given == [MANIFEST_NAME, "a.safetensors", MANIFEST_NAME]
    assert pushed.kept_files == 3
    verify(tmp_path / "there" / "deep", manifest)


@pytest.mark.parametrize("again", ["old", "new"])
def test_what_an_overwriting_push_left_when_it_broke_off_is_not_believed(
    tmp_path: Path, there: Noting, again: str
) -> None:
    snapshots = {"old": weights(tmp_path / "old"), "new": weights(tmp_path / "new", value=2.0)}
    push(*snapshots["old"], there)
    there.fail_at = "1_Pooling/config.json"
    (tmp_path / "new" / "1_Pooling" / "config.json").write_text("[]")
    snapshots["new"] = tmp_path / "new", create(tmp_path / "new", chunk_bytes=4096)
    with pytest.raises(CacheError):
        push(*snapshots["new"], there, force=True)
    there.fail_at = ""
    with pytest.raises(SnapshotError, match="cannot be read"):
        push(*snapshots[again], there)
    push(*snapshots[again], there, force=True)
    verify(tmp_path / "there" / "deep", snapshots[again][1])


def test_the_same_digests_of_other_chunks_are_other_bytes(tmp_path: Path, there: Noting) -> None:
    folder, manifest = weights(tmp_path / "here")
    push(folder, manifest, there)
    there.given.clear()
    push(folder, create(folder, chunk_bytes=1 << 20), there, force=True)
    assert there.given == [MANIFEST_NAME, "a.safetensors", "b.safetensors", MANIFEST_NAME]


def test_a_manifest_that_cannot_be_read_is_another(tmp_path: Path, there: Noting) -> None:
    folder, manifest = weights(tmp_path / "here")
    there.put(MANIFEST_NAME, b"{}")
    with pytest.raises(SnapshotError, match="a manifest that cannot be read"):
        push(folder, manifest, there)
    push(folder, manifest, there, force=True)
    assert Manifest.read(tmp_path / "there" / "deep") == manifest


def test_damage_is_not_pushed(tmp_path: Path, there: Noting) -> None:
    folder, manifest = weights(tmp_path / "here")
    (folder / "1_Pooling" / "config.json").write_text("[]")
    with pytest.raises(SnapshotCorrupt, match="Asset 1_Pooling"):
        push(folder, manifest, there)
    (folder / "1_Pooling" / "config.json").write_text("longer")
    with pytest.raises(SnapshotChanged, match="does not have its 2 bytes"):
        push(folder, manifest, there, verified=True)
    assert MANIFEST_NAME not in there.names()


def test_a_destination_that_takes_other_bytes_gets_no_manifest(tmp_path: Path) -> None:
    class Short(FolderSource):
        def put(self, name: str, content: Path | bytes, sent: Callable[[int], None] | None = None) -> None:
            super().put(name, b"short")

    folder, manifest = weights(tmp_path / "here")
    with pytest.raises(SnapshotChanged, match="does not have the bytes that were sent"):
        push(folder, manifest, Short(tmp_path / "there"))
    assert FolderSource(tmp_path / "there").names() == ["a.safetensors"]


def test_what_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    class Reading:
        url = "http://example/prefix"

    with pytest.raises(SnapshotError, match="http://example/prefix cannot be written to"):
        push(*weights(tmp_path / "here"), Reading())  # type: ignore[arg-type]
