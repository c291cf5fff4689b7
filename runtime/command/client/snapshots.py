"""Finds, reads and describes snapshots, for all commands about snapshots."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import click

from ....errors import ManifestError, SignatureInvalid
from ....snapshot.format.digests import ALGORITHMS
from ....snapshot.format.discover import find_manifest, find_signature
from ....snapshot.format.manifest import MANIFEST_NAME, Manifest
from ....snapshot.format.signature import SIGNER, SnapshotSignature, check_signature
from ....snapshot.sources.folder import FolderSource
from ....snapshot.sources.locate import is_remote, open_source, split_file, weights_file
from ....snapshot.sources.schemes import SCHEMES
from ....snapshot.sources.source import Source
from . import display

MANIFEST_SUFFIX = ".json"

digest_option = click.option(
    "--digests",
    type=click.Choice(list(ALGORITHMS)),
    default="xxh3-128",
    help="Digests of the chunks. Only sha256 withstands forged bytes and can be signed.",
)


def url_or_path(text: str) -> str | Path:
    """Convert an argument that is a URL, or the path of an existing file or folder."""
    return text.rstrip("/") if is_remote(text) else Path(str(click.Path(exists=True)(text)))


def public_key(text: str) -> str:
    """Convert an argument that is the public key of a signer."""
    if SIGNER.fullmatch(text):
        return text
    raise click.BadParameter(f"{text[:80]!r} is no public key, as `pilotflame snapshot sign` prints it.")


def of_caller() -> dict[str, str]:
    """Return the environment variables that a gateway takes only from a function's secrets, such as a token for web servers."""
    families = tuple(
        one
        for scheme in SCHEMES.values()
        if not scheme.identity.of_process
        for one in scheme.identity.families
    )
    return {name: value for name, value in os.environ.items() if name.startswith(families)}


def open_place(url: str) -> tuple[Source, str | None]:
    """Return the source at a URL. If the URL names weights or a manifest, also return the name of this file."""
    return open_source(url, of_caller()), split_file(url)[1]


def folder_of(path: Path) -> Path:
    """Return the folder of a snapshot. `path` is this folder or a file in it."""
    return path if path.is_dir() else path.parent


def read_manifest_of(path: str | Path) -> Manifest:
    """Return a snapshot's manifest. `path` is the snapshot's folder or URL, a weights file or the manifest.

    Raise ManifestError if the snapshot has no manifest.
    """
    if isinstance(path, str):
        return find_manifest(open_source(path, of_caller()), weights_file(path))
    file = path if path.suffix == MANIFEST_SUFFIX else folder_of(path) / MANIFEST_NAME
    if not file.is_file():
        remedy = f"Make one: pilotflame snapshot create {path}"
        raise ManifestError(f"{path} has no manifest ({file.name}).", remedy=remedy)
    return Manifest.read(file)


def signer_of(path: Path, manifest: Manifest, signers: Collection[str]) -> str | None:
    """Return the key that the signature beside a manifest names. The signature is checked only if `signers` are given.

    Raise SignatureInvalid if the check fails. Without `signers`, return None for a malformed signature.
    """
    text = find_signature(FolderSource(folder_of(path)), manifest)
    if signers:
        return check_signature(manifest, text, signers, str(path))
    with contextlib.suppress(SignatureInvalid):
        return None if text is None else SnapshotSignature.parse(text, str(path)).signer
    return None


def facts(manifest: Manifest) -> dict[str, Any]:
    """Return the facts that --json prints about a snapshot."""
    return {
        "digest": manifest.digest,
        "bytes": manifest.total_bytes,
        "digests": manifest.algorithm,
        "chunk_bytes": manifest.chunk_bytes,
        "shards": [{"name": shard.name, "bytes": shard.size_bytes} for shard in manifest.shards],
        "tensor_count": len(manifest.tensors),
        "dtypes": dict(Counter(tensor.dtype for tensor in manifest.tensors)),
        "aliases": dict(manifest.aliases),
        "assets": [{"name": asset.name, "bytes": asset.size_bytes} for asset in manifest.assets],
        "first_touch_recorded": bool(manifest.first_touch),
    }


def contents(manifest: Manifest) -> str:
    """Return a snapshot's size, files and tensors in one line."""
    types = Counter(tensor.dtype for tensor in manifest.tensors)
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in types.most_common())
    assets = f" and {display.counted(len(manifest.assets), 'asset')}" if manifest.assets else ""
    files = f"{display.counted(len(manifest.shards), 'file')}{assets}"
    tensors = display.counted(len(manifest.tensors), "tensor")
    return f"{display.size(manifest.total_bytes)} in {files}, {tensors} ({kinds})"


def rate(size_bytes: float, elapsed_s: float) -> str:
    return f"{elapsed_s:.2f} s, {display.size(size_bytes / max(elapsed_s, 1e-6))}/s"


def print_rate(facts: dict[str, Any], text: str, size_bytes: int, started_s: float, *, as_json: bool) -> None:
    """Print the result of a command that has processed `size_bytes` since `started_s`, with the time and the rate."""
    elapsed_s = time.monotonic() - started_s
    text = f"{text}, {rate(size_bytes, elapsed_s)}"
    display.print_result({**facts, "seconds": elapsed_s}, text, as_json=as_json)
