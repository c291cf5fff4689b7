"""Finds the manifest at a source, and the signature of the manifest. Without a manifest, finds the safetensors files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ...errors import SnapshotError, SourceDenied, SourceError, SourceMissing, SourceUnavailable
from ..sources.source import Listing, Source, read_all
from .create import HEADER_READERS, observe
from .digests import in_order
from .layout import INDEX_SUFFIX, SUFFIX, read_index
from .manifest import SIGNATURE_NAME, Manifest, read_manifest
from .signature import MAX_SIGNATURE_BYTES

INDEX = f"model{INDEX_SUFFIX}"
# The names that libraries give to a file of weights: transformers and sentence-transformers, diffusers, PEFT.
WHOLE = (f"model{SUFFIX}", f"diffusion_pytorch_model{SUFFIX}", f"adapter_model{SUFFIX}")
# The files beside weights that handlers read. A web server cannot be listed, so each of these names is tried.
BESIDE = (
    "adapter_config.json", "added_tokens.json", "chat_template.jinja", "chat_template.json", "config.json",
    "config_sentence_transformers.json", "generation_config.json", "merges.txt", "model_index.json", "modules.json",
    "preprocessor_config.json", "processor_config.json", "sentence_bert_config.json", "special_tokens_map.json",
    "spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
    "1_Pooling/config.json",
)  # fmt: skip


def find_manifest(source: Source, file: str | None = None) -> Manifest:
    """Return the manifest at `source`. If there is none, return a manifest of the files there, without the digests of chunks.

    With `file`, that file is the only shard. Raise SourceMissing if there are no weights, SourceError if the files
    cannot be read, and ManifestError, HeaderError or SnapshotError if the files are not valid.
    """
    try:
        manifest = read_manifest(source)
        if file is None or [shard.name for shard in manifest.shards] == [file]:
            return manifest
    except (SourceMissing, SourceDenied) as error:
        # After "denied", look for weights too: S3 answers so for a missing object if the bucket may not be listed.
        if error.details.get("code") == "NoSuchBucket":
            raise
        missing = error
    else:
        return observe(source, names_of(source, file), file)
    try:
        names = names_of(source, file)
    except SnapshotError as error:
        # Leave out the remedy of `read_manifest`, which is to make a manifest, because there are no weights.
        why = missing.__cause__ if isinstance(missing.__cause__, SourceError) else missing
        fault = f"There are no weights at {source.url}: {why.message} {error.message}"
        raise type(missing)(fault, remedy=why.remedy, details=why.details) from error
    return observe(source, names, file)


def find_signature(source: Source, manifest: Manifest | None) -> bytes | None:
    """Return the content of the signature's file beside the manifest at `source`, unchecked. None if there is no file.

    Return at most one byte more than MAX_SIGNATURE_BYTES. If the manifest cannot be signed, send no request.
    Raise SourceUnavailable if the source does not answer.
    """
    if manifest is None or manifest.algorithm != "sha256":
        return None
    try:
        return read_all(source, SIGNATURE_NAME, MAX_SIGNATURE_BYTES + 1)
    except SourceUnavailable:
        raise
    # Take any other error for a missing file. S3 may answer "denied" for a missing object, and other servers 400 or 405.
    except SourceError:
        return None


def names_of(source: Source, file: str | None = None) -> Sequence[str]:
    """Return the names of the weights at `source`, and of all files beside them.

    If the source cannot be listed, or lists no weights, look for files with usual names. Raise SnapshotError if no file
    is found.
    """
    names = _listed(source)
    if file is not None and file not in names:
        names = [file, *_present(source, BESIDE)]
    if any(name.endswith(SUFFIX) and "/" not in name for name in names):
        return names
    return _usual(source) or names or _refuse(source)


def _listed(source: Source) -> list[str]:
    try:
        return source.names() if isinstance(source, Listing) else []
    except SourceError:
        return []


def _usual(source: Source) -> list[str]:
    """Return the files of weights, and the files beside them, that have usual names. [] if there are no such weights."""
    if _present(source, (INDEX,)):
        weights = [INDEX, *sorted(set(read_index(source, INDEX).values()))]
    else:
        weights = _present(source, WHOLE)[:1]
    return [*weights, *_present(source, BESIDE)] if weights else []


def _present(source: Source, names: Sequence[str]) -> list[str]:
    def look(name: str, _buffer: memoryview) -> str:
        try:
            source.stat(name)
        except (SourceMissing, SourceDenied):
            return ""
        return name

    found = in_order((partial(look, name) for name in names), min(HEADER_READERS, len(names)), 0)
    return [name for name in found if name]


def _refuse(source: Source) -> Sequence[str]:
    remedy = f"Name one {SUFFIX} file in the URL, or put there the manifest that `pilotflame snapshot create` makes."
    raise SnapshotError(f"{source.url} cannot be listed.", remedy=remedy)
