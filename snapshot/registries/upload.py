"""Sends an artifact to a registry: each file as a layer, then the manifest, in the form of the model specification (ModelPack)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson

from ...errors import SnapshotChanged, SourceDenied, SourceError, SourceMissing, SourceUnavailable
from ..sources.exchange import Head
from ..sources.locate import WEIGHTS_SUFFIX
from ..sources.response import REDIRECTS
from ..sources.retries import Retries, retried
from ..sources.source import opened
from .artifact import FILEPATH, MANIFEST_TYPES, MAX_LAYERS, TITLE
from .blobs import RegistryBlobs
from .reference import digest_of

CHUNK_BYTES = 32 << 20
"""The bytes of one request. If a connection breaks, at most this many bytes are sent again."""
_BLOCK_BYTES = 1 << 20
_ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
_CONFIG_TYPE = "application/vnd.cncf.model.config.v1+json"
_WEIGHTS_TYPE = "application/vnd.cncf.model.weight.v1.raw"
_OTHER_TYPE = "application/vnd.cncf.model.weight.config.v1.raw"
# Some registries write "bytes=" before the range, as the examples of the specification do.
_RECEIVED = re.compile(r"(?:bytes=)?0-(\d{1,18})", re.ASCII)

ReportSent = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes [begin, end) of a file. Each iteration reads them anew, in blocks. Raises SnapshotChanged."""

    content: Path | bytes
    begin: int
    end: int

    def __iter__(self) -> Iterator[bytes]:
        left = self.end - self.begin
        try:
            with opened(self.content) as stream:
                stream.seek(self.begin)
                while left and (block := stream.read(min(_BLOCK_BYTES, left))):
                    left -= len(block)
                    yield block
        except OSError as error:
            raise _unreadable(self.content, error) from error
        if left:
            fault = f"{self.content!s} became shorter while it was sent."
            raise SnapshotChanged(fault, remedy="Create the manifest again, and push again.")


@dataclass(frozen=True, slots=True)
class BlobFile:
    """A file that becomes a blob."""

    name: str
    content: Path | bytes
    size_bytes: int
    digest: str

    @staticmethod
    def of(name: str, content: Path | bytes) -> BlobFile:
        """Read the whole file for its digest. Raise SnapshotChanged."""
        try:
            size = len(content) if isinstance(content, bytes) else content.stat().st_size
        except OSError as error:
            raise _unreadable(content, error) from error
        digest = hashlib.sha256()
        for block in FileRange(content, 0, size):
            digest.update(block)
        return BlobFile(name, content, size, f"sha256:{digest.hexdigest()}")

    def descriptor(self, media_type: str) -> dict[str, Any]:
        return {"mediaType": media_type, "digest": self.digest, "size": self.size_bytes}

    @property
    def layer(self) -> dict[str, Any]:
        """The descriptor of the layer. It has the file's name twice, because modctl and ORAS read different annotations."""
        kind = _WEIGHTS_TYPE if self.name.endswith(WEIGHTS_SUFFIX) else _OTHER_TYPE
        return {**self.descriptor(kind), "annotations": {FILEPATH: self.name, TITLE: self.name}}


def upload(
    blobs: RegistryBlobs, tag: str, files: Mapping[str, Path | bytes], sent: ReportSent | None
) -> tuple[str, set[str]]:
    """Send the files and, last, the manifest of `tag`. Return its digest, and the names of the files that the registry
    already had.

    The same files always give the same manifest. Raise SourceError if there are more files than a reader accepts.
    """
    if len(files) > MAX_LAYERS:
        fault = f"There are {len(files)} files, and an artifact at {blobs.url} may have at most {MAX_LAYERS}."
        raise SourceError(fault, remedy="Push to s3://, or remove files from the folder.")
    layers, kept = [], set()
    for name, content in files.items():
        file = BlobFile.of(name, content)
        if not BlobUpload(blobs, file, sent).run():
            kept.add(name)
        layers.append(file)
    model = {
        "descriptor": {}, "config": {"format": "safetensors"},
        "modelfs": {"type": "layers", "diffIds": [file.digest for file in layers]},
    }  # fmt: skip
    config = BlobFile.of("the configuration", orjson.dumps(model))
    BlobUpload(blobs, config, None).run()
    manifest = {
        "schemaVersion": 2, "mediaType": MANIFEST_TYPES[0], "artifactType": _ARTIFACT_TYPE,
        "config": config.descriptor(_CONFIG_TYPE), "layers": [file.layer for file in layers],
    }  # fmt: skip
    return _put_manifest(blobs, tag, orjson.dumps(manifest)), kept


def _put_manifest(blobs: RegistryBlobs, tag: str, text: bytes) -> str:
    headers = {"Content-Type": MANIFEST_TYPES[0], "Content-Length": str(len(text))}

    def put() -> str:
        head, body = blobs.send("PUT", blobs.url_of(f"manifests/{tag}"), headers, [text])
        if head.status // 100 == 2:
            return digest_of(text, "sha256")
        raise blobs.refused(head, body, f"the manifest of {tag}")

    return retried(put)


class BlobUpload:
    """Sends one file in chunks. After a failure, asks the registry which bytes it has, and sends only the other bytes again.
    If the registry does not say, sends the whole file again.
    """

    def __init__(self, blobs: RegistryBlobs, file: BlobFile, sent: ReportSent | None) -> None:
        self._blobs, self._file, self._sent = blobs, file, sent
        self._url = ""
        """The URL of the upload, which each response may change. "" before it has begun."""
        self._at = self._most = 0
        """How many bytes the registry has, and the largest number that it has had."""

    def run(self) -> bool:
        """Send the file, unless the registry has it. Return True if it was sent."""
        retries, step, done = Retries(), self._recovered, False
        while not done:
            before = self._most
            try:
                done, step = step(), self._advanced
            except SourceUnavailable as error:
                retries.wait(error)
                step = self._recovered
            if self._most > before:
                retries = Retries()
        self._note(self._file.size_bytes)
        return bool(self._url)

    def _advanced(self) -> bool:
        """Send the next request. Return True if it was the last one."""
        if not self._url:
            self._ask("POST", self._blobs.url_of("blobs/uploads/"), {"Content-Length": "0"})
            self._at = 0
            return False
        begin, end = self._at, min(self._file.size_bytes, self._at + CHUNK_BYTES)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(end - begin)}
        if begin and end > begin:
            headers["Content-Range"] = f"{begin}-{end - 1}"
        if end < self._file.size_bytes:
            headers["Content-Range"] = f"{begin}-{end - 1}"
            self._ask("PATCH", self._url, headers, FileRange(self._file.content, begin, end))
            self._note(end)
            return False
        mark = "&" if "?" in self._url else "?"
        url = f"{self._url}{mark}digest={quote(self._file.digest)}"
        self._ask("PUT", url, headers, FileRange(self._file.content, begin, end))
        return True

    def _ask(self, method: str, url: str, headers: Mapping[str, str], body: FileRange | None = None) -> None:
        """Send a request of the upload. Raise SourceUnavailable if a later request, after `_recovered`, may succeed."""
        head, text = self._blobs.send(method, url, headers, body or ())
        if head.status // 100 == 2:
            self._follow(head)
        elif self._url and head.status in {404, 416}:
            # Let `_recovered` find out more: the upload has expired, or the registry has another number of bytes.
            raise SourceUnavailable(f"{self._blobs.url} has no such upload any more (HTTP {head.status}).")
        else:
            raise self._blobs.refused(head, text, self._file.name)

    def _recovered(self) -> bool:
        """Ask which bytes the registry has, at the beginning and after a failure. Return True if it has the whole file."""
        if self._exists():
            return True
        if self._url:
            head, _ = self._blobs.send("GET", self._url, {})
            received = _RECEIVED.fullmatch(head.headers.get("range", ""))
            # Begin again after 0-0: a registry says so if it has no byte, and also if it has one byte.
            if head.status in {200, 202, 204, 416} and received is not None and int(received[1]):
                self._follow(head)
                self._at = min(int(received[1]) + 1, self._file.size_bytes)
            else:
                self._url, self._at = "", 0
        return False

    def _exists(self) -> bool:
        head, text = self._blobs.send("HEAD", self._blobs.url_of(f"blobs/{self._file.digest}"), {})
        if head.status in REDIRECTS:
            return self._exists_elsewhere()
        if head.status // 100 == 2 or head.status == 404:
            return head.status != 404
        raise self._blobs.refused(head, text, self._file.name)

    def _exists_elsewhere(self) -> bool:
        """Ask the storage to which the registry redirects. Return True if the storage has the blob, with the right size."""
        try:
            return self._blobs.stat(self._file.digest).size_bytes == self._file.size_bytes
        except (SourceMissing, SourceDenied):
            # Storage may answer "denied" for a missing object.
            return False

    def _follow(self, head: Head) -> None:
        if target := head.headers.get("location"):
            self._url = self._blobs.url_of("blobs/uploads/", target)
        elif not self._url:
            fault = f"{self._blobs.url} accepts the upload of {self._file.name} without Location."
            raise SourceError(fault, remedy="Check the registry, and the proxies in front of it.")

    def _note(self, at: int) -> None:
        self._at = at
        if at > self._most and self._sent is not None:
            self._sent(at - self._most)
        self._most = max(self._most, at)


def _unreadable(content: Path | bytes, error: OSError) -> SnapshotChanged:
    return SnapshotChanged(f"{content!s} cannot be read any more: {error.strerror}.")
