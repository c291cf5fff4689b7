"""Signatures of manifests: who has signed what, and everything that is refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import given
from hypothesis import strategies as some
from pilotflame.errors import SignatureInvalid, SnapshotError
from pilotflame.snapshot.format.create import observe
from pilotflame.snapshot.format.discover import find_signature
from pilotflame.snapshot.format.manifest import SIGNATURE_NAME, Manifest
from pilotflame.snapshot.format.signature import (
    MAX_SIGNATURE_BYTES,
    SIGNER,
    SnapshotSignature,
    check_signature,
    make_key,
    sign,
)
from pilotflame.snapshot.format.slices import part_of
from pilotflame.snapshot.sources.folder import FolderSource
from pulling import make

WHERE = "s3://models/voice"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys, and a folder with a signed snapshot of two small tensors."""
    found = tmp_path_factory.mktemp("signed")
    for name in ("key.pem", "other.pem"):
        make_key(found / name)
    manifest = make(found / "weights", algorithm="sha256", tensors=2, tensor_bytes=1 << 16)
    (found / "weights" / SIGNATURE_NAME).write_bytes(sign(manifest, found / "key.pem").to_json())
    return found


@pytest.fixture(scope="module")
def manifest(folder: Path) -> Manifest:
    return Manifest.read(folder / "weights")


@pytest.fixture(scope="module")
def text(folder: Path) -> bytes:
    return (folder / "weights" / SIGNATURE_NAME).read_bytes()


@pytest.fixture(scope="module")
def signer(text: bytes) -> str:
    return SnapshotSignature.parse(text, WHERE).signer


def refused(manifest: Manifest | None, text: bytes | None, *signers: str) -> str:
    with pytest.raises(SignatureInvalid, match=f"^{WHERE} has ") as caught:
        check_signature(manifest, text, signers, WHERE)
    assert caught.value.remedy
    return caught.value.message


def test_the_signature_is_the_pages(folder: Path, manifest: Manifest, text: bytes, signer: str) -> None:
    stored: dict[str, Any] = json.loads(text)
    assert list(stored) == list(SnapshotSignature.model_fields)
    private = serialization.load_pem_private_key((folder / "key.pem").read_bytes(), None)
    assert isinstance(private, ed25519.Ed25519PrivateKey)
    assert signer == f"ed25519:{base64.b64encode(private.public_key().public_bytes_raw()).decode()}"
    signed = b"pilotflame.manifest signature 1\n" + manifest.digest.encode()
    private.public_key().verify(base64.b64decode(stored["signature"]), signed)
    assert check_signature(manifest, text, ["ed25519:other", signer], WHERE) == signer


def test_what_a_node_adds_and_hints_leave_it_valid(manifest: Manifest, text: bytes, signer: str) -> None:
    part = part_of(manifest, ["t0"], {}).with_realm("a" * 64)
    assert part.digest != manifest.digest
    hinted = manifest.model_copy(update={"first_touch": ("t1", "t0")})
    for one in (part, hinted):
        assert check_signature(one, text, [signer], WHERE) == signer


def test_another_key_is_not_accepted(folder: Path, manifest: Manifest, text: bytes, signer: str) -> None:
    other = sign(manifest, folder / "other.pem")
    assert f"a signature by {other.signer}, which is not an accepted key" in refused(
        manifest, other.to_json(), signer
    )
    assert "not an accepted key" in refused(manifest, text, other.signer)
    # Combine the signature of one key with the name of another key.
    forged = other.model_copy(update={"signer": signer})
    assert "a signature of another manifest" in refused(manifest, forged.to_json(), signer)


def test_an_altered_manifest_and_another_snapshot_are_refused(
    manifest: Manifest, text: bytes, signer: str, tmp_path: Path
) -> None:
    digests = [digest for shard in manifest.shards for digest in shard.chunks]
    altered = manifest.with_chunks(["0" * 64, *digests[1:]])
    moved = manifest.model_copy(update={"aliases": {"tied": "t0"}})
    for one in (altered, moved, make(tmp_path, 1, algorithm="sha256")):
        assert "a signature of another manifest" in refused(one, text, signer)


def test_what_is_missing_is_named(manifest: Manifest, text: bytes, signer: str, tmp_path: Path) -> None:
    fast = make(tmp_path)
    assert "digests of xxh3-128" in refused(fast, text, signer)
    observed = observe(FolderSource(tmp_path), ["model.safetensors"])
    for none in (None, observed):
        assert "no manifest, and so no signature" in refused(none, None, signer)
    assert refused(manifest, None, signer) == f"{WHERE} has no signature."


def test_a_file_of_any_length_is_read_within_its_limit(
    manifest: Manifest, text: bytes, signer: str, folder: Path, tmp_path: Path
) -> None:
    source = FolderSource(tmp_path)
    assert find_signature(source, manifest) is None
    (tmp_path / SIGNATURE_NAME).write_bytes(text + b" " * (MAX_SIGNATURE_BYTES - len(text)))
    assert check_signature(manifest, find_signature(source, manifest), [signer], WHERE) == signer
    with (tmp_path / SIGNATURE_NAME).open("ab") as stream:
        stream.truncate(1 << 40)
    long = find_signature(source, manifest)
    assert long is not None
    assert len(long) == MAX_SIGNATURE_BYTES + 1
    assert f"a signature file of over {MAX_SIGNATURE_BYTES} bytes" in refused(manifest, long, signer)
    # This manifest cannot be signed, so `find_signature` does not ask the source for its signature.
    assert find_signature(FolderSource(folder / "weights"), make(tmp_path)) is None


@given(data=some.data())
def test_a_damaged_signature_is_refused(
    data: some.DataObject, manifest: Manifest, text: bytes, signer: str
) -> None:
    damage = data.draw(some.sampled_from(["cut", "byte", "other"]))
    if damage == "cut":
        damaged = text[: data.draw(some.integers(0, len(text) - 2))]
    elif damage == "byte":
        at, value = data.draw(some.integers(0, len(text) - 2)), data.draw(some.integers(0, 255))
        damaged = text[:at] + bytes([value]) + text[at + 1 :]
    else:
        damaged = data.draw(some.binary(max_size=600))
    if damaged.strip() != text.strip():
        refused(manifest, damaged, signer)


@pytest.mark.parametrize("key", ["ed25519:", "ed25519:" + "A" * 43, "ed25519:" + "A" * 42 + "B=", "rsa:AAAA"])
def test_other_texts_are_no_keys(key: str) -> None:
    assert SIGNER.fullmatch(key) is None


def test_digests_that_do_not_withstand_forged_bytes_are_not_signed(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="xxh3-128, which does not withstand forged bytes") as caught:
        sign(make(tmp_path), folder / "key.pem")
    assert "--digests sha256" in caught.value.remedy


def test_a_key_is_private_and_never_replaced(folder: Path, manifest: Manifest, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    make_key(key)
    assert key.stat().st_mode & 0o777 == 0o600
    made = key.read_bytes()
    with pytest.raises(SnapshotError, match="File exists"):
        make_key(key)
    assert key.read_bytes() == made
    for mode in (0o640, 0o604, 0o620):
        key.chmod(mode)
        with pytest.raises(SnapshotError, match=f"mode {mode:04o}") as caught:
            sign(manifest, key)
        assert caught.value.remedy.endswith(f"chmod 600 {key}")
    key.chmod(0o400)
    sign(manifest, key)


@pytest.mark.parametrize("kind", ["text", "public", "encrypted", "elliptic curve", "missing"])
def test_what_is_no_ed25519_key_is_refused(kind: str, manifest: Manifest, tmp_path: Path) -> None:
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private, plain = ed25519.Ed25519PrivateKey.generate(), serialization.NoEncryption()
    texts = {
        "text": b"secret",
        "public": private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo),
        "encrypted": private.private_bytes(pem, pkcs8, serialization.BestAvailableEncryption(b"x")),
        "elliptic curve": ec.generate_private_key(ec.SECP256R1()).private_bytes(pem, pkcs8, plain),
    }
    if kind in texts:
        (tmp_path / "key.pem").write_bytes(texts[kind])
        (tmp_path / "key.pem").chmod(0o600)
    with pytest.raises(SnapshotError, match="cannot be read" if kind == "missing" else "is not an Ed25519"):
        sign(manifest, tmp_path / "key.pem")
