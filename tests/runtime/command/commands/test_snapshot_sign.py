"""`pilotflame snapshot sign` and `verify`: output, files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pilotflame.errors import SignatureInvalid, SnapshotCorrupt, SnapshotError
from pilotflame.snapshot.format.manifest import SIGNATURE_NAME, Manifest

from .test_snapshot import run


def facts(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json").stdout)
    return found


def test_a_snapshot_is_signed_and_verified(weights: Path, tmp_path: Path) -> None:
    key = tmp_path / "signing.pem"
    assert facts("create", weights, "--digests", "sha256")["digests"] == "sha256"
    assert Manifest.read(weights).algorithm == "sha256"
    assert facts("verify", weights)["signer"] is None
    made = facts("sign", weights, "--key", key, "--new-key")
    assert made["signature"] == str(weights / SIGNATURE_NAME)
    assert made["digest"] == Manifest.read(weights).digest
    assert made["digest"] in run("sign", weights, "--key", key).output
    signer = made["signer"]
    told = facts("verify", weights)
    assert (told["signer"], told["signer_accepted"]) == (signer, False)
    assert f"intact and signed by {signer} (not checked without --signer)" in run("verify", weights).output
    assert f"intact and signed by {signer}:" in run("verify", weights, "--signer", signer).output
    signature = (weights / SIGNATURE_NAME).read_bytes()
    (weights / SIGNATURE_NAME).write_bytes(signature[:-20])
    assert facts("verify", weights)["signer"] is None
    with pytest.raises(SignatureInvalid, match="malformed"):
        run("verify", weights, "--signer", signer)
    (weights / SIGNATURE_NAME).write_bytes(signature)
    # A later manifest does not list the signature as an asset. The signature then belongs to another
    # manifest.
    (weights / "more.json").write_text("{}")
    run("create", weights, "--digests", "sha256")
    assert [asset.name for asset in Manifest.read(weights).assets] == ["config.json", "more.json"]
    with pytest.raises(SignatureInvalid, match="another manifest"):
        run("verify", weights, "--signer", signer)
    run("sign", weights, "--key", key)
    other = facts("sign", weights, "--key", tmp_path / "other.pem", "--new-key")["signer"]
    with pytest.raises(SignatureInvalid, match="not an accepted key"):
        run("verify", weights, "--signer", signer)
    # A valid signature does not hide wrong bytes.
    (weights / "config.json").write_text("[]")
    with pytest.raises(SnapshotCorrupt, match=r"config\.json"):
        run("verify", weights, "--signer", signer, "--signer", other)


def test_a_copy_of_the_folder_has_the_signature(weights: Path, tmp_path: Path) -> None:
    run("create", weights, "--digests", "sha256")
    signer = facts("sign", weights, "--key", tmp_path / "key.pem", "--new-key")["signer"]
    run("push", weights, tmp_path / "pushed")
    run("pull", tmp_path / "pushed", tmp_path / "pulled")
    assert facts("verify", tmp_path / "pulled", "--signer", signer)["signer_accepted"]


def test_what_cannot_be_signed_gets_no_signature(weights: Path, tmp_path: Path) -> None:
    run("create", weights)
    with pytest.raises(SnapshotError, match="xxh3-128"):
        run("sign", weights, "--key", tmp_path / "key.pem", "--new-key")
    with pytest.raises(SignatureInvalid, match="digests of xxh3-128"):
        run("verify", weights, "--signer", f"ed25519:{'A' * 43}=")
    refused = run("verify", weights, "--signer", "signing.pem")
    assert refused.exit_code == 2
    assert "is no public key" in refused.output
    with pytest.raises(SnapshotError, match="cannot be written to"):
        run("sign", "https://host/models", "--key", tmp_path / "key.pem")
    assert not (weights / SIGNATURE_NAME).exists()
    assert not (tmp_path / "key.pem").exists()


def test_converted_weights_may_have_digests_of_sha256(weights: Path, tmp_path: Path) -> None:
    run("convert", weights, tmp_path / "out", "--digests", "sha256")
    assert Manifest.read(tmp_path / "out").algorithm == "sha256"
