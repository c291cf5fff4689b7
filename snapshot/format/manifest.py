"""Defines the manifest: a JSON file that makes the safetensors files in its folder a snapshot.

The manifest has the position of each tensor, so that restoring parses no headers. It also has the digests of all chunks,
so that a fetch can verify each arriving chunk. A manifest is untrusted input: each fault raises ManifestError.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator

from ..._version import __version__
from ...errors import ManifestError, SourceMissing
from ...foreign_json import first_errors
from ..publish import publish
from ..sources.source import Source, Writable, name_fault, read_all
from .digests import ALGORITHMS, Algorithm, AlgorithmName
from .dtypes import DTYPES
from .header import MAX_FILE_BYTES, MAX_RANK, MAX_TENSORS, bulk_fault, name_is_sound, repeated

MANIFEST_NAME = "pilotflame.manifest.json"
SIGNATURE_NAME = f"{MANIFEST_NAME}.sig"
"""The file beside the manifest with its signature (see `signature`)."""
MAX_MANIFEST_BYTES = 128 << 20
MAX_SHARDS = 1 << 14
MAX_CHUNKS = 1 << 19
"""Enough for 2 TiB of weights with the default size of chunks. Parsing this many digests takes 1 s. No other thread runs meanwhile."""
MIN_CHUNK_BYTES = 4 << 10
MAX_CHUNK_BYTES = 1 << 30
DEFAULT_CHUNK_BYTES = 4 << 20
MAX_ASSETS = 1024
MAX_ASSET_BYTES = 64 << 20
MAX_ASSETS_BYTES = 512 << 20
# An asset may be in at most this many nested folders.
MAX_ASSET_DEPTH = 4

# If pydantic finds more faults than this, which only happens with hostile input, the message has only their number.
_FAULTS_LISTED = 100
# `_crowd_fault` checks only larger JSON. Smaller JSON cannot cause enough faults to exhaust the memory.
_LARGE_BYTES = 1 << 20
_REMEDY = "Make the manifest anew: pilotflame snapshot create."
UNKNOWN_DIGEST = "0" * 32
"""Stands for the digest of a chunk that was not read yet. Only manifests with `observed` have this digest."""
LOCAL_FIELDS = ("observed", "part", "realm")
"""The fields that only manifests on a node have. Other readers refuse fields that they do not know."""
REALM_DIGITS = 24
"""How many digits of a snapshot's digest are taken from its realm. It is infeasible to construct a realm with given digits."""


def _file_name(name: str) -> str:
    # Names of hidden files are reserved for readers: a cache stores the state of a download in such a file.
    hidden = "it is hidden" if "/." in f"/{name}" else None
    if fault := name_fault(name) or hidden:
        raise ValueError(f"not a file inside the snapshot: {fault}")
    return name


def _is_shallow(name: str) -> bool:
    return name.count("/") <= MAX_ASSET_DEPTH


def _must(hold: Callable[[str], bool], fault: str) -> AfterValidator:
    def validate(text: str) -> str:
        if not hold(text):
            raise ValueError(fault)
        return text

    return AfterValidator(validate)


Bytes = Annotated[int, Field(ge=0, le=MAX_FILE_BYTES)]
FileName = Annotated[str, AfterValidator(_file_name)]
TensorName = Annotated[str, _must(name_is_sound, "not a tensor's name")]
# `_check_digests` checks that a digest has the length for the algorithm of its manifest.
ChunkDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}([0-9a-f]{32})?$")]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Shard(_Frozen):
    """A safetensors file. `chunks` has a digest per chunk. The first chunk includes the header's bytes."""

    name: FileName
    size_bytes: Bytes
    data_offset_bytes: Bytes
    chunks: Annotated[tuple[ChunkDigest, ...], FailFast(), Field(max_length=MAX_CHUNKS)]


class TensorEntry(_Frozen):
    """A tensor. Its file is `Manifest.shards[shard]`. `offset_bytes` is its position in that file."""

    name: TensorName
    dtype: Annotated[str, _must(DTYPES.__contains__, "unknown dtype")]
    shape: Annotated[tuple[Bytes, ...], FailFast(), Field(max_length=MAX_RANK)]
    shard: Annotated[int, Field(ge=0, lt=MAX_SHARDS)]
    offset_bytes: Bytes
    size_bytes: Bytes


class Asset(_Frozen):
    """A small file that belongs to the weights, such as config.json. `digest` is the digest of the whole file."""

    name: Annotated[FileName, _must(_is_shallow, f"an asset is at most {MAX_ASSET_DEPTH} folders deep")]
    size_bytes: Annotated[int, Field(ge=0, le=MAX_ASSET_BYTES)]
    digest: ChunkDigest


class Provenance(_Frozen):
    """The program and the files that the snapshot was created with. The snapshot's digest does not depend on them."""

    created_by: Annotated[str, Field(max_length=200)] = ""
    source: Annotated[str, Field(max_length=4096)] = ""


class Observed(_Frozen):
    """Where shards without a manifest were found, and the version of each shard, such as its ETag.

    `url` is the address of the first shard at its server. It keeps a cache from confusing these shards with shards of
    the same versions on another server.
    """

    url: Annotated[str, Field(max_length=4096)]
    versions: Annotated[tuple[Annotated[str, Field(max_length=1024)], ...], Field(max_length=MAX_SHARDS)]

    @property
    def provenance(self) -> Provenance:
        """The provenance of a manifest of these shards. If the version of a shard changes, so does the provenance."""
        digest = hashlib.sha256("\0".join(self.versions).encode("utf-8", "surrogateescape")).hexdigest()
        source = f"{self.url[:4000]}, versions {digest}"
        return Provenance(created_by=f"pilotflame {__version__}", source=source)


class NeededPart(_Frozen):
    """The part of a snapshot that a function needs. Only its chunks are fetched.

    `chunks` has the first and the last chunk of each range of chunks, in ascending order. Chunks are numbered from 0
    through all shards. `slices` are the slices from which the part was made (see `format.slices`).
    """

    chunks: Annotated[tuple[tuple[int, int], ...], FailFast(), Field(max_length=MAX_CHUNKS)]
    slices: Annotated[dict[str, tuple[int, int, int]], Field(max_length=MAX_TENSORS)] = {}


class Manifest(_Frozen):
    """The description of a snapshot. Manifests of the same files and chunk size have the same `digest`."""

    version: Literal[1] = 1
    algorithm: AlgorithmName = "xxh3-128"
    """The algorithm of the digests of chunks and assets."""
    # A multiple of the page size, so that no page has bytes of two chunks: a write to a private mapping copies the
    # page, and the copy would never get the bytes of a chunk that arrives later.
    chunk_bytes: Annotated[
        int, Field(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES, multiple_of=MIN_CHUNK_BYTES)
    ] = DEFAULT_CHUNK_BYTES
    shards: Annotated[tuple[Shard, ...], FailFast(), Field(max_length=MAX_SHARDS)]
    tensors: Annotated[tuple[TensorEntry, ...], FailFast(), Field(max_length=MAX_TENSORS)]
    aliases: Annotated[dict[TensorName, TensorName], Field(max_length=MAX_TENSORS)] = {}
    """Further names of stored tensors (tied weights). Maps each alias to the name of a tensor."""
    first_touch: Annotated[tuple[TensorName, ...], FailFast(), Field(max_length=MAX_TENSORS)] = ()
    """The tensors in the order in which a forward pass first reads them. Empty until that order is recorded.

    It is a hint: like provenance, it does not change the digest.
    """
    assets: Annotated[tuple[Asset, ...], FailFast(), Field(max_length=MAX_ASSETS)] = ()
    provenance: Provenance = Provenance()
    observed: Observed | None = None
    """Set if there was no manifest beside the files. The digest of each chunk is then added when the chunk arrives."""

    part: NeededPart | None = None
    """Set on a node that needs only a part of the files' bytes."""

    realm: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    """The hash of the place and the credentials with which a node fetches the snapshot (see `sources.realm`)."""

    @staticmethod
    def parse(text: bytes) -> Manifest:
        """Return the manifest whose JSON form is `text`. Raise ManifestError if it is not valid."""
        if len(text) > MAX_MANIFEST_BYTES:
            fault = f"The manifest is over the limit of {MAX_MANIFEST_BYTES} bytes."
            raise ManifestError(fault, remedy=_REMEDY)
        if found := bulk_fault(text) or _crowd_fault(text):
            raise ManifestError(f"The manifest is not valid: {found}.", remedy=_REMEDY)
        try:
            return Manifest.model_validate_json(text)
        except ValidationError as error:
            raise ManifestError(_first_fault(error), remedy=_REMEDY) from error

    @staticmethod
    def build(**fields: Any) -> Manifest:
        """Return a manifest of these fields. Raise ManifestError if they are not valid."""
        try:
            return Manifest(**fields)
        except ValidationError as error:
            raise ManifestError(_first_fault(error)) from error

    @staticmethod
    def read(path: Path) -> Manifest:
        """Return the manifest in file or folder `path`. Raise ManifestError if there is no valid manifest."""
        file = path / MANIFEST_NAME if path.is_dir() else path
        try:
            with file.open("rb") as stream:
                return Manifest.parse(stream.read(MAX_MANIFEST_BYTES + 1))
        except OSError as error:
            raise ManifestError(f"{file} cannot be read: {error.strerror}.", remedy=_REMEDY) from error

    def to_json(self) -> bytes:
        """Return the JSON form, which `parse` reads."""
        unset = {field for field in LOCAL_FIELDS if not getattr(self, field)}
        return self.model_dump_json(exclude=unset).encode() + b"\n"

    def write(self, path: Path) -> None:
        """Write the JSON form to file `path` atomically."""
        with publish(path) as stream:
            stream.write(self.to_json())

    @property
    def digest(self) -> str:
        """The sha256 (hex) of the canonical JSON, without the hints, which are provenance and first_touch.

        With `observed`, the JSON has no digests of chunks either, so that the result is the same before and after a
        fetch adds them. With `realm`, the last digits identify the realm: each realm has its own copy in a cache.
        """
        without: dict[str, Any] = {"provenance": True, "first_touch": True, "realm": True}
        without |= {"observed": True} if self.observed is None else {"shards": {"__all__": {"chunks"}}}
        # Leave out the slices of a part: ranks that need the same chunks share one snapshot in a cache.
        without |= {"part": True if self.part is None else {"slices"}}
        plain = self.model_dump(mode="json", exclude=without)
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return digest[: len(digest) - len(realm_digits(self.realm))] + realm_digits(self.realm)

    @property
    def digest_algorithm(self) -> Algorithm:
        """The algorithm of the digests of chunks and assets."""
        return ALGORITHMS[self.algorithm]

    @property
    def has_digests(self) -> bool:
        """True if the digest of every needed chunk is known."""
        if self.observed is None:
            return True
        digests = [digest for shard in self.shards for digest in shard.chunks]
        ranges = ((0, len(digests) - 1),) if self.part is None else self.part.chunks
        return not any(UNKNOWN_DIGEST in digests[first : last + 1] for first, last in ranges)

    def with_chunks(self, digests: Sequence[str]) -> Manifest:
        """Return this manifest with other digests of chunks. `digests` lists them shard by shard."""
        given = iter(digests)
        shards = tuple(
            shard.model_copy(update={"chunks": tuple(islice(given, len(shard.chunks)))})
            for shard in self.shards
        )
        return self.model_copy(update={"shards": shards})

    def published(self) -> Manifest:
        """Return the manifest to store beside the files. Call it when the digest of every chunk is known."""
        if self.observed is None:
            return self
        return self.model_copy(update={"observed": None, "provenance": self.observed.provenance})

    def with_realm(self, realm: str) -> Manifest:
        """Return this manifest with a realm."""
        return self.model_copy(update={"realm": realm})

    @property
    def total_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def needed_bytes(self) -> int:
        """The size of the chunks that are fetched: all chunks, or the chunks of the part."""
        if self.part is None:
            return self.total_bytes
        return sum(
            end - begin for index in range(len(self.shards)) for begin, end in self.needed_extents(index)
        )

    def needed_extents(self, shard: int) -> list[tuple[int, int]]:
        """Return the ranges of bytes of shard number `shard` that are fetched."""
        size_bytes = self.shards[shard].size_bytes
        if self.part is None:
            return [(0, size_bytes)]
        before = sum(len(one.chunks) for one in self.shards[:shard])
        after, found = before + len(self.shards[shard].chunks), []
        for first, last in self.part.chunks:
            low, high = max(first, before) - before, min(last + 1, after) - before
            if low < high:
                found.append((low * self.chunk_bytes, min(high * self.chunk_bytes, size_bytes)))
        return found

    def chunks_of(self, shard: int, begin: int, end: int) -> range:
        """Return the numbers of the chunks with bytes [begin, end) of a shard, counted through all shards."""
        before = sum(len(one.chunks) for one in self.shards[:shard])
        return range(
            before + begin // self.chunk_bytes, before - (-end // self.chunk_bytes) if begin < end else 0
        )

    @property
    def files(self) -> tuple[Shard | Asset, ...]:
        """All files except the manifest: shards, then assets."""
        return (*self.shards, *self.assets)

    @property
    def assets_bytes(self) -> int:
        return sum(asset.size_bytes for asset in self.assets)

    @model_validator(mode="after")
    def _check(self) -> Self:
        # pydantic turns a ValueError into a ValidationError, and `parse` turns that into a ManifestError.
        _check_files(self.files)
        _check_totals(self)
        _check_observed(self)
        _check_part(self)
        _check_unique("tensor", (tensor.name for tensor in self.tensors))
        for shard in self.shards:
            _check_shard(shard, self.chunk_bytes)
        _check_digests(self)
        for tensor in self.tensors:
            _check_tensor(tensor, self.shards)
        _check_overlap(self.tensors, self.shards)
        _check_names(self)
        return self


def read_manifest(source: Source) -> Manifest:
    """Return the manifest in `source`. Raise SourceError or, if the manifest is not valid, ManifestError."""
    try:
        text = read_all(source, MANIFEST_NAME, MAX_MANIFEST_BYTES + 1)
    except SourceMissing as error:
        if error.details.get("code") == "NoSuchBucket":
            raise
        place = source.url if isinstance(source, Writable) else "FOLDER (the one that is served)"
        fault = f"There is no manifest at {source.url}: {error.message}"
        remedy = f"Check the URL. To make a manifest of existing weights: pilotflame snapshot create {place}"
        raise SourceMissing(fault, remedy=remedy, details=error.details) from error
    manifest = Manifest.parse(text)
    for field in LOCAL_FIELDS:
        if getattr(manifest, field):
            fault = f"The manifest at {source.url} is one of a cache: it has `{field}`."
            raise ManifestError(fault, remedy=_REMEDY)
    return manifest


def realm_digits(realm: str) -> str:
    """Return the last digits of the digests of all snapshots of a realm."""
    return realm[:REALM_DIGITS]


def _crowd_fault(text: bytes) -> str | None:
    """Return a fault if pydantic could find millions of faults in `text`, each of which takes a kilobyte. Else None."""
    if len(text) <= _LARGE_BYTES:
        return None
    try:
        document = orjson.loads(text)
    except ValueError:
        return "it is not JSON"
    if not _is_object(document, len(Manifest.model_fields)):
        return "it is not an object of a manifest's fields"
    for field, kind in (("shards", Shard), ("tensors", TensorEntry), ("assets", Asset)):
        entries, most = document.get(field, []), len(kind.model_fields)
        if not isinstance(entries, list) or not all(_is_object(entry, most) for entry in entries):
            return f"{field} is not a list of objects of {most} fields"
    for field, most in (("aliases", MAX_TENSORS), ("provenance", len(Provenance.model_fields))):
        if not _is_object(document.get(field, {}), most):
            return f"{field} is not an object of at most {most} fields"
    return None


def _is_object(value: object, most: int) -> bool:
    return isinstance(value, dict) and len(value) <= most


def _check_unique(kind: str, names: Iterable[str]) -> None:
    if (name := repeated(names)) is not None:
        raise ValueError(f"{kind} {name!r} is there twice")


def _check_files(files: Sequence[Shard | Asset]) -> None:
    _check_unique("file", (file.name for file in files))
    reserved = (MANIFEST_NAME, SIGNATURE_NAME)
    for file in files:
        if file.name in reserved:
            raise ValueError(f"{file.name!r} is the name of the manifest or of its signature")
    # Lists of components are sorted so that the paths below a folder directly follow the folder's own path.
    paths = sorted(name.split("/") for name in (*reserved, *(file.name for file in files)))
    for one, two in pairwise(paths):
        if two[: len(one)] == one:
            raise ValueError(f"{'/'.join(one)!r} is both a file and a folder")


def _check_totals(manifest: Manifest) -> None:
    chunks = sum(len(shard.chunks) for shard in manifest.shards)
    for count, what, limit in (
        (chunks, "chunks of shards", MAX_CHUNKS),
        (manifest.total_bytes, "bytes of shards", MAX_FILE_BYTES),
        (manifest.assets_bytes, "bytes of assets", MAX_ASSETS_BYTES),
    ):
        if count > limit:
            raise ValueError(f"it holds {count} {what}, over the limit of {limit}")


def _check_observed(manifest: Manifest) -> None:
    if manifest.observed is None:
        return
    if len(manifest.observed.versions) != len(manifest.shards):
        raise ValueError("observed does not have one version for each shard")
    # Fetches compute digests with this algorithm only, and UNKNOWN_DIGEST has its length.
    if manifest.algorithm != "xxh3-128":
        raise ValueError("observed has another algorithm than xxh3-128")


def _check_part(manifest: Manifest) -> None:
    after = 0
    for first, last in manifest.part.chunks if manifest.part is not None else ():
        if not after <= first <= last:
            raise ValueError("part does not have ascending ranges of chunks")
        after = last + 1
    if after > sum(len(shard.chunks) for shard in manifest.shards):
        raise ValueError("part has a chunk that no shard has")


def _check_shard(shard: Shard, chunk_bytes: int) -> None:
    needed = -(-shard.size_bytes // chunk_bytes)
    if len(shard.chunks) != needed:
        raise ValueError(f"shard {shard.name!r} has {len(shard.chunks)} chunk digests and needs {needed}")
    if shard.data_offset_bytes > shard.size_bytes:
        raise ValueError(f"shard {shard.name!r} has its data after its end")


def _check_digests(manifest: Manifest) -> None:
    digits = manifest.digest_algorithm.digits
    digests = chain((asset.digest for asset in manifest.assets), *(shard.chunks for shard in manifest.shards))
    if not set(map(len, digests)) <= {digits}:
        raise ValueError(f"a digest does not have the {digits} digits of {manifest.algorithm}")


def _check_tensor(tensor: TensorEntry, shards: tuple[Shard, ...]) -> None:
    if tensor.shard >= len(shards):
        raise ValueError(f"tensor {tensor.name!r} is in shard {tensor.shard} of {len(shards)}")
    if tensor.size_bytes != DTYPES[tensor.dtype].size_bytes(tensor.shape):
        raise ValueError(f"tensor {tensor.name!r} has a size that its shape and dtype do not make")
    shard = shards[tensor.shard]
    end_bytes = tensor.offset_bytes + tensor.size_bytes
    if tensor.offset_bytes < shard.data_offset_bytes or end_bytes > shard.size_bytes:
        raise ValueError(f"tensor {tensor.name!r} is outside the data of shard {shard.name!r}")


def _check_overlap(tensors: tuple[TensorEntry, ...], shards: tuple[Shard, ...]) -> None:
    # If two tensors shared bytes, writing to one would change the other. Tensors that share all bytes on purpose are
    # stored as one tensor and an alias.
    placed = [tensor for tensor in tensors if tensor.size_bytes]
    placed.sort(key=lambda tensor: (tensor.shard, tensor.offset_bytes))
    for one, two in pairwise(placed):
        if one.shard == two.shard and one.offset_bytes + one.size_bytes > two.offset_bytes:
            shard = shards[one.shard].name
            raise ValueError(f"tensors {one.name!r} and {two.name!r} overlap in shard {shard!r}")


def _check_names(manifest: Manifest) -> None:
    stored = {tensor.name for tensor in manifest.tensors}
    for alias, target in manifest.aliases.items():
        if alias in stored:
            raise ValueError(f"alias {alias!r} shadows a tensor")
        if target not in stored:
            raise ValueError(f"alias {alias!r} points to {target!r}, which is not a tensor")
    _check_unique("first touch of", manifest.first_touch)
    for name in manifest.first_touch:
        if name not in stored:
            raise ValueError(f"first touch names {name!r}, which is not a tensor")


def _first_fault(error: ValidationError) -> str:
    # Do not call errors() for many faults: it creates a dict of a kilobyte for each fault.
    if error.error_count() > _FAULTS_LISTED:
        return f"The manifest is not valid: it has {error.error_count()} faults."
    fault = first_errors(error, 1)[0]
    where = ".".join(str(step)[:80] for step in fault["loc"])
    what = fault["msg"].removeprefix("Value error, ")[:300]
    return f"The manifest is not valid{f' at {where}' if where else ''}: {what}."
