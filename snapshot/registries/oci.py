"""Defines the source that reads the files of an artifact in an OCI registry."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from ...addresses import is_loopback
from ...errors import SnapshotCorrupt, SourceError, SourceMissing
from ..sources.access import ANY, Access
from ..sources.http import HttpConnection
from ..sources.locate import WEIGHTS_SUFFIX
from ..sources.source import Blob, ObjectInfo, below, changed, name_fault, read_all, same_version
from ..sources.variables import PLAIN_HTTP_VARIABLE, REGISTRY
from .artifact import ACCEPTED, ArtifactFile, ImageManifest, Layer, files_of
from .blobs import RegistryBlobs
from .login import find_login
from .reference import Reference, digest_of
from .upload import upload

KEPT_BYTES = 96 << 20
"""The most bytes of layers that a source keeps in memory. A layer that is larger is never kept. An asset has at most 64 MiB."""


class OciSource:
    """The files below `folder` of the artifact `oci://registry/repository:tag@digest/folder`.

    A tag is resolved to its digest once, so that all files are of the same artifact. Small layers without weights are read
    as a whole, and verified before any reader gets their bytes. Other layers are read in ranges, and the fetch
    verifies those with weights (see Attested).
    """

    versioned_by_content = True

    def __init__(self, url: str, secrets: Mapping[str, str] | None = None, access: Access = ANY) -> None:
        self._reference = Reference.of(url)
        self.url = str(self._reference)
        given = secrets or {}
        variables = REGISTRY.variables(given, access)
        registry, repository = self._reference.registry, self._reference.repository
        login = find_login(registry, repository, given, access)
        plain = is_plain(registry, variables.get(PLAIN_HTTP_VARIABLE, ""))
        self._blobs = RegistryBlobs(self._reference, login, access, plain=plain)
        self._asking = threading.RLock()
        self._digest = self._reference.digest
        self._found: dict[str, ArtifactFile] = {}
        self._weights: set[str] = set()
        """The digests of the layers with weights."""
        self._kept: dict[str, memoryview] = {}

    def begin_writing(self) -> None:
        """From now on, also request the right to write. Raise SourceError if the URL names a digest or a folder."""
        if self._reference.digest or self._reference.folder:
            part = "a digest" if self._reference.digest else "a folder"
            fault = f"{self.url} names {part}, and an artifact is pushed as a whole, to a tag."
            raise SourceError(fault, remedy="Push to oci://registry/repository:tag.")
        self._blobs.begin_writing()

    def put_all(
        self, files: Mapping[str, Path | bytes], sent: Callable[[int], None] | None = None
    ) -> set[str]:
        """Write an artifact of `files` to the tag. Return the names of the files that the registry already had.

        Afterwards, `pinned` returns the URL of this artifact.
        """
        digest, kept = upload(self._blobs, self._reference.tag, files, sent)
        self.forget()
        self._digest = digest
        return kept

    def pinned(self) -> str:
        """Return the URL with the digest of the artifact. The tag stays in the URL, before the digest."""
        self._files()
        return str(self._reference.pinned(self._digest))

    def names(self) -> list[str]:
        """Return the names of the files below the URL's folder, without hidden files."""
        return below(self._reference.folder, self._files())

    def stat(self, name: str) -> ObjectInfo:
        return self.file(name).info

    def read_into(self, name: str, offset: int, view: memoryview) -> int:
        file = self.file(name)
        count = max(0, min(len(view), file.size_bytes - offset))
        if (kept := self.kept(file)) is not None:
            view[:count] = kept[offset : offset + count]
            return count
        return self._blobs.read_into(file.layer.digest, file.offset + offset, view[:count])

    def connect(self) -> OciConnection:
        return OciConnection(self, self._blobs.connect())

    def served_at(self, name: str) -> str:
        """Return the URL of the layer that contains file `name`, without credentials."""
        return self._blobs.served_at(self.file(name).layer.digest)

    def blob_of(self, name: str) -> Blob:
        """Return the layer that contains file `name`, with the names and the offsets of all files in the layer."""
        layer = self.file(name).layer
        inside = {
            shown: file.offset
            for shown in self.names()
            if (file := self.file(shown)).layer.digest == layer.digest
        }
        return Blob(layer.digest, layer.size_bytes, tuple(sorted(inside.items())))

    def read_blob(self, blob: Blob, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes of a layer that start at `offset`. Raise SnapshotCorrupt if the layer is too short."""
        if self._blobs.read_into(blob.digest, offset, view) < len(view):
            raise self.corrupt(blob.digest, "it is shorter than its manifest says")

    def forget(self) -> None:
        """Forget the layers in memory. Unless the URL has a digest, the next read resolves the tag again."""
        with self._asking:
            self._blobs.forget()
            self._kept.clear()
            if not self._reference.digest:
                self._digest, self._found = "", {}

    def prepare(self) -> None:
        """Do the work of the first request in advance, such as loading the trusted authorities."""
        self._blobs.prepare()

    def file(self, name: str) -> ArtifactFile:
        """Return a file of the artifact. Raise SourceMissing."""
        fault = name_fault(name)
        path = f"{self._reference.folder}/{name}" if self._reference.folder else name
        file = None if fault else self._files().get(path)
        if file is None:
            why = f"is not a name below {self.url}: {fault}" if fault else f"is in no layer of {self.url}"
            raise SourceMissing(f"{name[:80]!r} {why}.", remedy="Check the reference, or push the file too.")
        return file

    def kept(self, file: ArtifactFile) -> memoryview | None:
        """Return the verified bytes of a file in a small layer without weights. None for a file in another layer."""
        layer = file.layer
        if layer.size_bytes > KEPT_BYTES or layer.digest in self._weights:
            return None
        with self._asking:
            if (whole := self._kept.get(layer.digest)) is None:
                whole = self._verified(layer)
                if sum(map(len, self._kept.values())) + len(whole) > KEPT_BYTES:
                    self._kept.clear()
                self._kept[layer.digest] = whole
        return whole[file.offset : file.offset + file.size_bytes]

    def corrupt(self, digest: str, fault: str) -> SnapshotCorrupt:
        where = f"{self.url}: layer {digest}"
        return SnapshotCorrupt(
            f"{where} is damaged: {fault}.", remedy="Push the artifact again.", details={"layer": digest}
        )

    def _verified(self, layer: Layer) -> memoryview:
        content = read_all(self._blobs, layer.digest, KEPT_BYTES)
        found = digest_of(content, layer.digest)
        if found != layer.digest:
            raise self.corrupt(layer.digest, f"it has the digest {found}")
        return memoryview(content)

    def _files(self) -> dict[str, ArtifactFile]:
        """Return the files by name. The first call asks the registry for the manifest."""
        with self._asking:
            if not self._found:
                version, where = self._digest or self._reference.tag, self.url
                text = self._manifest(version)
                manifest = ImageManifest.parse(text, where)
                self._digest = self._digest or digest_of(text, "sha256")
                if manifest.manifests:
                    manifest = ImageManifest.parse(self._manifest(manifest.only(where).digest), where)
                self._found = files_of(manifest, self._blobs, where)
                names = self._found.items()
                self._weights = {file.layer.digest for name, file in names if name.endswith(WEIGHTS_SUFFIX)}
            return self._found

    def _manifest(self, version: str) -> bytes:
        """Return the manifest of a tag or digest. Raise SnapshotCorrupt if it does not have the digest."""
        text = self._blobs.manifest(version, ACCEPTED)
        if ":" in version and (found := digest_of(text, version)) != version:
            fault = f"{self.url}: the manifest has the digest {found}, not {version}."
            raise SnapshotCorrupt(fault, remedy="Check the registry.", details={"manifest": version})
        return text


class OciConnection:
    """A Connection that reads ranges of layers, or the bytes of a layer that the source keeps in memory."""

    def __init__(self, source: OciSource, connection: HttpConnection) -> None:
        self._source, self._connection = source, connection
        self._kept: memoryview | None = None

    @property
    def used(self) -> bool:
        return self._connection.used

    def begin(self, name: str, begin: int, end: int, version: str = "") -> ObjectInfo:
        file = self._source.file(name)
        if version and not same_version(file.info.version, version):
            raise changed(f"{self._source.url}/{name}", name, "its layer is another")
        kept = self._source.kept(file)
        self._kept = None if kept is None else kept[begin:end]
        if kept is None:
            layer = file.layer
            served = self._connection.begin(layer.digest, file.offset + begin, file.offset + end)
            if served.size_bytes != layer.size_bytes:
                fault = f"layer {layer.digest} has {served.size_bytes} bytes, not {layer.size_bytes}"
                raise changed(f"{self._source.url}/{name}", name, fault)
        return file.info

    def read_into(self, view: memoryview) -> int:
        if self._kept is None:
            return self._connection.read_into(view)
        count = min(len(view), len(self._kept))
        view[:count] = self._kept[:count]
        self._kept = self._kept[count:]
        return count

    def close(self) -> None:
        self._connection.close()

    def release(self) -> None:
        self._connection.release()


def is_plain(registry: str, listed: str) -> bool:
    """Return True if requests to the registry use http: the registry is on this machine, or `listed` has its name."""
    named = registry in {name.strip() for name in listed.split(",")}
    return named or is_loopback(urlsplit(f"//{registry}").hostname or "")
