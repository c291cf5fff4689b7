"""The manifest of an artifact is bounded, because any registry may send it. The files of an artifact are found in its layers."""

from __future__ import annotations

import io
import json
import tarfile
from typing import Any

import pytest
from pilotflame.errors import SourceError
from pilotflame.snapshot.registries import artifact
from pilotflame.snapshot.registries.artifact import FILEPATH, TITLE, ArtifactFile, ImageManifest, files_of

LAYER = {"mediaType": "x", "digest": f"sha256:{'0' * 64}", "size": 1}


def test_only_the_first_wrong_annotation_is_described() -> None:
    wrong = {"layers": [LAYER | {"annotations": {str(number): number for number in range(50_000)}}]}
    with pytest.raises(SourceError, match=r"layers\.0\.annotations\.0: Input should be a valid string"):
        ImageManifest.parse(json.dumps(wrong).encode(), "here")


def test_only_the_first_wrong_layer_is_described() -> None:
    with pytest.raises(SourceError, match=r"layers\.0\.mediaType"):
        ImageManifest.parse(json.dumps({"layers": [{}] * 10_000}).encode(), "here")


def test_values_are_counted_before_they_are_parsed() -> None:
    text = b'{"layers":[' + b"[]," * 1_000_000 + b"[]]}"
    with pytest.raises(SourceError, match="marks of values"):
        ImageManifest.parse(text, "here")


def test_a_manifest_is_read() -> None:
    (layer,) = ImageManifest.parse(json.dumps({"layers": [LAYER]}).encode(), "here").layers
    assert layer.size_bytes == 1


# -- files


class Blobs:
    """Serves one layer, and notes what was read."""

    def __init__(self, content: bytes) -> None:
        self.content, self.reads = content, list[tuple[int, int]]()

    def read_into(self, _name: str, offset: int, view: memoryview) -> int:
        found = self.content[offset : offset + len(view)]
        view[: len(found)] = found
        self.reads.append((offset, len(view)))
        return len(found)


def archive(*names: str, content: bytes = b"abc") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            if name.endswith("/"):
                member.type = tarfile.DIRTYPE
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def found(*layers: dict[str, Any], content: bytes = b"") -> dict[str, ArtifactFile]:
    blobs: Any = Blobs(content)
    return files_of(ImageManifest.parse(json.dumps({"layers": layers}).encode(), "here"), blobs, "here")


def layer(media_type: str, size: int = 1, **annotations: str) -> dict[str, Any]:
    names = {{"path": FILEPATH, "title": TITLE}[key]: value for key, value in annotations.items()}
    return LAYER | {"mediaType": media_type, "size": size, "annotations": names}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (layer("a.weight.v1.raw", path="model.safetensors"), ["model.safetensors"]),
        (layer("x", title="./config.json"), ["config.json"]),
        (layer("x", path="a", title="b"), ["a"]),
        (layer("x", path="", title="b"), ["b"]),
        (layer("x"), []),
        (layer("a.code.v1.tar", path="a"), []),
        (layer("a.dataset.v1.raw", path="a"), []),
        (layer("a.doc.v1.tar+gzip", path="a"), []),
    ],
)
def test_a_layer_is_the_file_that_its_annotations_name(given: dict[str, Any], names: list[str]) -> None:
    files = found(given)
    assert list(files) == names
    assert all((one.offset, one.size_bytes) == (0, 1) for one in files.values())
    assert all(one.info.version == f'"{"0" * 64}"' for one in files.values())


@pytest.mark.parametrize("kind", ["+gzip", "+zstd", "+xz", ".gz"])
def test_compressed_weights_are_refused(kind: str) -> None:
    with pytest.raises(SourceError, match="is compressed"):
        found(layer(f"a.weight.v1.tar{kind}", path="a"))


def test_the_members_of_an_archive_are_ranges_of_its_layer() -> None:
    content = archive("d/", "d/model.safetensors", "./config.json")
    files = found(layer("a.weight.v1.tar", size=len(content)), content=content)
    assert list(files) == ["d/model.safetensors", "config.json"]
    for one in files.values():
        assert content[one.offset :][: one.size_bytes] == b"abc"
        assert one.info.version == f'"{"0" * 64}-{one.offset}"'


@pytest.mark.parametrize("name", ["../a", "/a", "d/../../a"])
def test_a_name_that_leads_out_is_refused(name: str) -> None:
    content = archive(name)
    for given in (layer("x", path=name), layer("x.tar", size=len(content))):
        with pytest.raises(SourceError, match="which is not a name"):
            found(given, content=content)


def test_an_archive_is_bounded_by_its_layer_and_by_a_number_of_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = archive("a", "b")
    with pytest.raises(SourceError, match="shorter than its descriptor says"):
        found(layer("x.tar", size=len(content) + 10_000), content=content[:600])
    with pytest.raises(SourceError, match="not a valid tar archive: a member is larger than it"):
        found(layer("x.tar", size=513), content=content)
    monkeypatch.setattr(artifact, "MAX_ARCHIVED", 3)
    assert list(found(layer("x.tar", size=len(content)), content=content)) == ["a", "b"]
    with pytest.raises(SourceError, match="more than 1 members"):
        found(layer("x.tar", size=len(content)), layer("x.tar", size=len(content)), content=content)


def test_headers_that_lie_close_together_are_read_at_once() -> None:
    content = archive(*(f"f{number}" for number in range(16)))
    blobs: Any = Blobs(content)
    manifest = ImageManifest.parse(
        json.dumps({"layers": [layer("x.tar", size=len(content))]}).encode(), "here"
    )
    assert len(files_of(manifest, blobs, "here")) == 16
    assert len(blobs.reads) <= 3


def test_an_index_of_one_manifest_is_that_manifest() -> None:
    def index(*digits: str) -> ImageManifest:
        manifests = [LAYER | {"digest": f"sha256:{digit * 64}"} for digit in digits]
        return ImageManifest.parse(json.dumps({"manifests": manifests}).encode(), "here")

    assert index("1").only("here").digest == f"sha256:{'1' * 64}"
    with pytest.raises(SourceError, match=f"index of 2 manifests: sha256:{'1' * 64}, sha256:{'2' * 64}"):
        index("1", "2").only("here")
    with pytest.raises(SourceError, match="has no layers"):
        ImageManifest.parse(b"{}", "here")
