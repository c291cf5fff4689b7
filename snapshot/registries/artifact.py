"""Reads the manifest of an artifact, and finds the files in its layers. A layer is a file or a tar archive of files.

This follows the model specification of the CNCF (ModelPack), and also what ORAS and other clients push: layers whose
annotations have the name of a file. Compressed layers cannot be read in ranges.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from typing import IO, Annotated, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ...errors import SourceError
from ...foreign_json import excess, failing_fast, first_errors
from ..sources.source import ObjectInfo, Source, name_fault
from .reference import DIGEST

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
ACCEPTED = ", ".join((*MANIFEST_TYPES, *INDEX_TYPES))
MAX_MANIFEST_BYTES = 4 << 20
"""The size up to which registries accept a manifest."""
MAX_LAYERS = 10_000
MAX_ARCHIVED = 10_000
"""The most files in all archives of an artifact."""
FILEPATH, TITLE = "org.cncf.model.filepath", "org.opencontainers.image.title"
"""The annotations with the name of the file in a layer. The model specification defines FILEPATH, and ORAS writes TITLE."""
_COMPRESSED = ("+gzip", "+zstd", ".gzip", ".zstd", "+xz", ".gz")
# Leave out layers of these kinds, because no handler reads their files.
_LEFT_OUT = (".dataset.", ".code.")
_WINDOW_BYTES = 16 << 10
# Limit one read of `tarfile`, which reads a long name or extended attributes at once.
_MOST_READ_BYTES = 1 << 20


class _Parsed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Layer(_Parsed):
    """A descriptor of a layer or, in an index, of a manifest."""

    media_type: Annotated[str, Field(alias="mediaType", max_length=255)]
    digest: Annotated[str, Field(pattern=f"^({DIGEST})$")]
    size_bytes: Annotated[int, Field(alias="size", ge=0, le=1 << 50)]
    annotations: dict[str, str] = {}

    @property
    def path(self) -> str:
        """The path of the file or the folder in the layer, from the annotations. "" if they have no path."""
        return next((self.annotations[name] for name in (FILEPATH, TITLE) if self.annotations.get(name)), "")

    @property
    def compressed(self) -> bool:
        return self.media_type.endswith(_COMPRESSED)

    @property
    def left_out(self) -> bool:
        return any(kind in self.media_type for kind in _LEFT_OUT)

    def __hash__(self) -> int:
        return hash(self.digest)


class ImageManifest(_Parsed):
    """The manifest of an artifact or, if it has `manifests`, an index of manifests."""

    media_type: Annotated[str, Field(alias="mediaType")] = ""
    layers: Annotated[tuple[Layer, ...], Field(max_length=MAX_LAYERS)] = ()
    manifests: Annotated[tuple[Layer, ...], Field(max_length=MAX_LAYERS)] = ()

    @staticmethod
    def parse(text: bytes, where: str) -> ImageManifest:
        """Return the manifest whose JSON form is `text`. Raise SourceError, which names `where`."""
        try:
            if many := excess(text):
                raise _no_manifest(where, f"it has {many}")
            found: ImageManifest = _MANIFEST.validate_json(text)
        except ValidationError as error:
            first = first_errors(error, 1)[0]
            place = ".".join(map(str, first["loc"]))[:200]
            raise _no_manifest(where, f"{place}: {first['msg']}") from None
        if not found.layers and not found.manifests:
            fault = f"{where} has no layers."
            raise SourceError(fault, remedy="Name an artifact that holds safetensors files.")
        return found

    def only(self, where: str) -> Layer:
        """Return the only manifest of this index. If there are several, raise SourceError with their digests."""
        if len(self.manifests) == 1:
            return self.manifests[0]
        digests = ", ".join(one.digest for one in self.manifests[:8])
        fault = f"{where} is an index of {len(self.manifests)} manifests: {digests}."
        raise SourceError(fault, remedy="Name one of them with @sha256:… in the URL.")


_MANIFEST = failing_fast(TypeAdapter(ImageManifest))


def _no_manifest(where: str, why: str) -> SourceError:
    fault = f"{where} is not a manifest of the OCI image specification: {why}."
    return SourceError(fault, remedy="Push the artifact again.")


@dataclass(frozen=True, slots=True)
class ArtifactFile:
    """A file of an artifact: `size_bytes` bytes of a layer, from `offset` on."""

    layer: Layer
    offset: int
    size_bytes: int

    @property
    def info(self) -> ObjectInfo:
        """The size and the version. The version is the digest of the layer, with the offset of a file in an archive. So a file
        has the same version in every artifact with this layer.
        """
        digits = self.layer.digest.partition(":")[2]
        whole = self.size_bytes == self.layer.size_bytes
        return ObjectInfo(self.size_bytes, f'"{digits}"' if whole else f'"{digits}-{self.offset}"')


def files_of(manifest: ImageManifest, blobs: Source, where: str) -> dict[str, ArtifactFile]:
    """Return the files in the layers by their names. A file of a later layer replaces a file with the same name.

    Raise SourceError if a layer that may hold weights is compressed, or if an archive or a name is not valid.
    """
    found: dict[str, ArtifactFile] = {}
    archived = 0
    for layer in manifest.layers:
        if layer.left_out or (layer.compressed and ".doc." in layer.media_type):
            continue
        if layer.compressed:
            fault = f"{where}: layer {layer.digest} is compressed ({layer.media_type}), so no range of it can be read."
            raise SourceError(fault, remedy="Push the weights without compression, as .raw or .tar.")
        if layer.media_type.endswith(".tar"):
            members = _members(layer, blobs, where, MAX_ARCHIVED - archived)
            archived += len(members)
            found |= members
        elif layer.path:
            found[_checked(layer.path, layer, where)] = ArtifactFile(layer, 0, layer.size_bytes)
    return found


def _checked(path: str, layer: Layer, where: str) -> str:
    """Return the name of a file. Raise SourceError if the path leads out of the artifact."""
    name = path.removeprefix("./")
    if fault := name_fault(name):
        fault = f"{where}: layer {layer.digest} has a file {path[:80]!r}, which is not a name: {fault}."
        raise SourceError(fault, remedy="Do not use this artifact unless you know who pushed it.")
    return name


def _members(layer: Layer, blobs: Source, where: str, most: int) -> dict[str, ArtifactFile]:
    """Return the regular files in a tar archive. Read only the headers of the members."""
    found: dict[str, ArtifactFile] = {}
    count = 0
    try:
        with tarfile.open(fileobj=cast("IO[bytes]", _Window(layer, blobs)), mode="r:") as archive:
            while (member := archive.next()) is not None:
                count += 1
                end = member.offset_data + member.size
                if count > most or member.size < 0 or end > layer.size_bytes:
                    fault = (
                        f"it has more than {most} members" if count > most else "a member is larger than it"
                    )
                    raise tarfile.ReadError(fault)
                if member.isreg() and not member.issparse():
                    name = _checked(member.name, layer, where)
                    found[name] = ArtifactFile(layer, member.offset_data, member.size)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        fault = f"{where}: layer {layer.digest} is not a valid tar archive: {error}."
        raise SourceError(fault, remedy="Push the artifact again.") from None
    return found


class _Window:
    """Lets `tarfile` read a layer like a file. Keeps the range that was read last, so that small reads need few requests."""

    def __init__(self, layer: Layer, blobs: Source) -> None:
        self._layer, self._blobs = layer, blobs
        self._at = self._begin = 0
        self._held = b""

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int) -> int:
        self._at = offset
        return offset

    def read(self, size: int) -> bytes:
        size = min(size, self._layer.size_bytes - self._at)
        if size <= 0:
            return b""
        if size > _MOST_READ_BYTES:
            raise tarfile.ReadError(f"a header has more than {_MOST_READ_BYTES} bytes")
        begin = self._at - self._begin
        if not 0 <= begin <= begin + size <= len(self._held):
            self._fill(size)
            begin = 0
        self._at += size
        return self._held[begin : begin + size]

    def _fill(self, size: int) -> None:
        wanted = min(max(size, _WINDOW_BYTES), self._layer.size_bytes - self._at)
        buffer = bytearray(wanted)
        if self._blobs.read_into(self._layer.digest, self._at, memoryview(buffer)) < wanted:
            raise tarfile.ReadError("it is shorter than its descriptor says")
        self._begin, self._held = self._at, bytes(buffer)
