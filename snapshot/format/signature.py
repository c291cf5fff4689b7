"""Signs manifests with Ed25519 (RFC 8032), and checks signatures.

A signature signs the digest of the manifest, which has the digests of the weights. It protects the weights only if other
bytes with the same digests cannot be forged. So a manifest with another algorithm than sha256 is neither signed nor
accepted.

The signature depends on the digest of the manifest. So it cannot be a field of the manifest, and has a file of its own.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...errors import SignatureInvalid, SnapshotError
from ..extras import needs

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from .manifest import Manifest

MAX_SIGNATURE_BYTES = 4 << 10
SIGNER = re.compile(r"ed25519:[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=")
"""A signer's public key: 32 bytes in base64."""
_SIGNATURE = r"[A-Za-z0-9+/]{85}[AQgw]=="
# Begins every signed text, so that a signature for another purpose never fits a manifest.
_PURPOSE = b"pilotflame.manifest signature 1\n"
_MAX_KEY_BYTES = 64 << 10
_SIGN = "Sign it: pilotflame snapshot sign."
_CREATE = "Make it and sign it: pilotflame snapshot create --digests sha256, then pilotflame snapshot sign."


class SnapshotSignature(BaseModel):
    """The content of the signature's file. `signature` has 64 bytes in base64."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1] = 1
    signer: Annotated[str, Field(pattern=f"^{SIGNER.pattern}$")]
    signature: Annotated[str, Field(pattern=f"^{_SIGNATURE}$")]

    @staticmethod
    def parse(text: bytes, where: str) -> SnapshotSignature:
        """Return the signature of the snapshot at `where`, whose JSON is `text`. Raise SignatureInvalid."""
        if len(text) > MAX_SIGNATURE_BYTES:
            raise _invalid(where, f"a signature file of over {MAX_SIGNATURE_BYTES} bytes", _SIGN)
        try:
            return SnapshotSignature.model_validate_json(text)
        except ValidationError:
            raise _invalid(where, "a signature file that is malformed or cut off", _SIGN) from None

    def to_json(self) -> bytes:
        """Return the JSON form, which `parse` reads."""
        return self.model_dump_json().encode() + b"\n"


def sign(manifest: Manifest, key: Path, *, new_key: bool = False) -> SnapshotSignature:
    """Sign a manifest with the private key in a file. With `new_key`, first write a new key to this file.

    Raise SnapshotError if the algorithm of the digests is not sha256, or if the key cannot be used.
    """
    if manifest.algorithm != "sha256":
        fault = f"The digests of the chunks are {manifest.algorithm}, which does not withstand forged bytes."
        remedy = "Make the manifest with other digests, and sign it then: pilotflame snapshot create --digests sha256."
        raise SnapshotError(fault, remedy=remedy)
    if new_key:
        make_key(key)
    private = _read_key(key)
    signer = f"ed25519:{_base64(private.public_key().public_bytes_raw())}"
    return SnapshotSignature(signer=signer, signature=_base64(private.sign(_signed(manifest))))


def check_signature(
    manifest: Manifest | None, text: bytes | None, signers: Collection[str], where: str
) -> str:
    """Return which of `signers` has signed the manifest of the snapshot at `where`. Raise SignatureInvalid.

    `text` is the content of the signature's file, or None if there is no such file. `manifest` is None if there is no
    manifest.
    """
    if manifest is None or manifest.observed is not None:
        raise _invalid(where, "no manifest, and so no signature", _CREATE)
    if manifest.algorithm != "sha256":
        raise _invalid(where, f"digests of {manifest.algorithm}, which a signature cannot protect", _CREATE)
    if text is None:
        raise _invalid(where, "no signature", _SIGN)
    found = SnapshotSignature.parse(text, where)
    if found.signer not in signers:
        remedy = "Sign it with an accepted key. If you know whose key it is, accept this key, too."
        raise _invalid(where, f"a signature by {found.signer}, which is not an accepted key", remedy)
    with needs("The check of a signature", "cryptography"):
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415
    try:
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(found.signer.partition(":")[2]))
        key.verify(base64.b64decode(found.signature), _signed(manifest))
    except (InvalidSignature, ValueError):
        remedy = "Fetch the manifest and the signature again. If you trust the present manifest, sign it."
        raise _invalid(where, "a signature of another manifest", remedy) from None
    return found.signer


def make_key(file: Path) -> None:
    """Write a new private key to a new file that only this user can read. Raise SnapshotError if the file exists."""
    with needs("A new key", "cryptography"):
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415
    text = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(text)
    except OSError as error:
        fault = f"{file} cannot be made: {error.strerror}."
        raise SnapshotError(
            fault, remedy="Name a file that does not exist, in a folder that you may write to."
        ) from error


def _read_key(file: Path) -> Ed25519PrivateKey:
    with needs("A signature", "cryptography"):
        from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
        from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415
    try:
        with file.open("rb") as stream:
            mode, text = os.fstat(stream.fileno()).st_mode, stream.read(_MAX_KEY_BYTES)
    except OSError as error:
        raise SnapshotError(f"{file} cannot be read: {error.strerror}.", remedy="Check the path.") from error
    if mode & 0o077:
        fault = f"{file} is a private key, and other users have rights on it (mode {mode & 0o777:04o})."
        raise SnapshotError(fault, remedy=f"Take them away: chmod 600 {file}")
    try:
        key = load_pem_private_key(text, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        fault = f"{file} is not an Ed25519 private key in PEM without a passphrase."
        raise SnapshotError(fault, remedy="Make one: openssl genpkey -algorithm ed25519 -out key.pem")
    return key


def _signed(manifest: Manifest) -> bytes:
    """Return the bytes that are signed. Leave out `part` and `realm`, which differ between nodes."""
    return _PURPOSE + manifest.model_copy(update={"part": None, "realm": ""}).digest.encode()


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _invalid(where: str, found: str, remedy: str) -> SignatureInvalid:
    return SignatureInvalid(f"{where} has {found}.", remedy=remedy)
