"""The commands that check and sign snapshots: `pilotflame snapshot verify|sign`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from ....errors import SnapshotError
from ....snapshot.format.manifest import SIGNATURE_NAME, read_manifest
from ....snapshot.format.signature import sign as sign_manifest
from ....snapshot.format.verify import verify as verify_files
from ....snapshot.sources.folder import FolderSource
from ....snapshot.sources.source import Writable
from ..client import display, options
from ..client.snapshots import (
    contents,
    facts,
    folder_of,
    open_place,
    print_rate,
    public_key,
    read_manifest_of,
    signer_of,
    url_or_path,
)


@click.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--signer", "signers", metavar="KEY", multiple=True, type=public_key,
    help="Require a signature by this public key (ed25519:…); repeatable.",
)  # fmt: skip
@options.as_json
def verify(path: Path, signers: tuple[str, ...], as_json: bool) -> None:
    """Read every byte of the snapshot at PATH and compare its digests.

    If the snapshot is damaged, the error names the first damaged file, chunk and tensors, and the exit code is 1. With
    --signer, the manifest must also be signed by one of these keys.

    \b
    Examples:
      pilotflame snapshot verify weights/
      pilotflame snapshot verify weights/ --signer ed25519:1WU+Cvev6uzc6nmeV+Gz3MMbDjDQRAFF+wrQi1mjJWs=
    """
    manifest, started_s = read_manifest_of(path), time.monotonic()
    signer = signer_of(path, manifest, signers)
    with display.progress(f"verifying {path}") as progress:
        verify_files(folder_of(path), manifest, progress)
    found: dict[str, Any] = {"verified": True, "signer": signer, "signer_accepted": bool(signers)}
    unchecked = "" if signers else " (not checked without --signer)"
    signed = "" if signer is None else f" and signed by {signer}{unchecked}"
    text = f"{path} is intact{signed}: {contents(manifest)}"
    print_rate(found | facts(manifest), text, manifest.total_bytes, started_s, as_json=as_json)


@click.command()
@click.argument("path", metavar="PATH_OR_URL", type=url_or_path)
@click.option(
    "--key", required=True, type=click.Path(dir_okay=False, path_type=Path),
    help="File with an Ed25519 private key in PEM, which only you can read.",
)  # fmt: skip
@click.option("--new-key", is_flag=True, help="First write a new key to this file.")
@options.as_json
def sign(path: str | Path, key: Path, new_key: bool, as_json: bool) -> None:
    """Sign the manifest of the snapshot at PATH_OR_URL, and write the signature beside it.

    The manifest must have digests of sha256, because other digests do not withstand forged bytes. The command prints the
    public key, which PILOTFLAME_SNAPSHOT_SIGNERS and `verify --signer` take.

    At a URL, it signs the manifest that the storage sends now. Compare the printed digest with the digest that
    `create --json` or `push --json` has printed, or sign the folder before you push it.

    \b
    Examples:
      pilotflame snapshot sign weights/ --key signing.pem --new-key
      pilotflame snapshot sign s3://bucket/models/llama --key signing.pem
    """
    source = open_place(path)[0] if isinstance(path, str) else FolderSource(folder_of(path))
    if not isinstance(source, Writable):
        remedy = "Sign it in a folder, and upload the signature beside the manifest."
        raise SnapshotError(f"{source.url} cannot be written to.", remedy=remedy)
    manifest = read_manifest(source)
    made = sign_manifest(manifest, key, new_key=new_key)
    source.put(SIGNATURE_NAME, made.to_json())
    file = f"{source.url}/{SIGNATURE_NAME}"
    found = {"signature": file, "signer": made.signer, "digest": manifest.digest}
    text = f"wrote {file}: manifest {manifest.digest} is signed by {made.signer}"
    display.print_result(found, text, as_json=as_json)
