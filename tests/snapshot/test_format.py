"""docs/snapshot-format.md and the code agree: limits, fields, types, the example and its digest."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pilotflame.snapshot.format import header, manifest, signature
from pilotflame.snapshot.format.digests import ALGORITHMS, AlgorithmName
from pilotflame.snapshot.format.dtypes import DTYPES
from pilotflame.snapshot.format.manifest import Asset, Manifest, Shard, TensorEntry
from pilotflame.snapshot.format.signature import SnapshotSignature, check_signature, sign
from pilotflame.snapshot.sources import source

PAGE = (Path(__file__).parents[2] / "docs" / "snapshot-format.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table after a line that starts with `heading`, without the table's head."""
    table = re.search(rf"^{re.escape(heading)}.*?\n(\|.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    assert table, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()[2:]]


def test_every_limit_is_the_codes() -> None:
    said = {name.strip("`"): int(value.replace(",", "")) for name, value, _ in rows("### Limits")}
    found = {}
    for module in (source, header, manifest, signature):
        found |= {
            name: value for name, value in vars(module).items() if re.match(r"(MAX|MIN|DEFAULT)_", name)
        }
    assert said == found


def test_every_type_is_the_codes() -> None:
    said = {
        name.strip("` "): int(size)
        for names, size in rows("## The safetensors subset")
        for name in names.split(",")
    }
    assert said == {name: dtype.bits for name, dtype in DTYPES.items()}


@pytest.mark.parametrize(
    ("heading", "model"), [("## The manifest", Manifest), ("A shard:", Shard), ("A tensor:", TensorEntry)]
)
def test_every_field_is_the_codes(heading: str, model: type[Manifest | Shard | TensorEntry]) -> None:
    said = rows(heading)
    assert [row[0].strip("`") for row in said] == list(model.model_fields)
    if len(said[0]) == 4:
        required = [row[0].strip("`") for row in said if row[2] == "yes"]
        assert required == [name for name, field in model.model_fields.items() if field.is_required()]
    else:
        assert all(field.is_required() for field in model.model_fields.values())


def test_an_assets_fields_are_the_codes() -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith("An asset:"))
    assert re.findall(r"`(\w+)`", line) == list(Asset.model_fields)


def test_every_algorithm_is_the_codes() -> None:
    said = rows("A digest is in lower-case")
    assert [row[0].strip("`") for row in said] == list(ALGORITHMS)
    for name, _, digits, example in said:
        algorithm = ALGORITHMS[cast("AlgorithmName", name.strip("`"))]
        assert (algorithm.digits, algorithm.digest(b"{}")) == (int(digits), example.strip("`"))


def test_the_signatures_example_is_one(tmp_path: Path) -> None:
    assert [row[0].strip("`") for row in rows("A manifest with `sha256`")] == list(
        SnapshotSignature.model_fields
    )
    manifests = re.findall(r"digest is `(\w+)`:\n\n```json\n(.*?)```", PAGE, re.DOTALL)
    found = Manifest.parse(manifests[1][1].encode())
    assert found.digest == manifests[1][0]
    example = re.search(r"RFC 8032, section 7\.1, test 1:\n\n```json\n(.*?)```", PAGE, re.DOTALL)
    assert example
    said, key = example[1].encode(), tmp_path / "key.pem"
    secret = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    pem = Ed25519PrivateKey.from_private_bytes(secret).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    key.write_bytes(pem)
    key.chmod(0o600)
    assert sign(found, key) == SnapshotSignature.parse(said, "the page")
    signer = SnapshotSignature.parse(said, "the page").signer
    assert check_signature(found, said, [signer], "the page") == signer


def test_the_example_is_one_and_its_digest_is_made_as_the_page_says() -> None:
    example = re.search(r"digest is `(\w+)`:\n\n```json\n(.*?)```", PAGE, re.DOTALL)
    assert example
    assert Manifest.parse(example[2].encode()).digest == example[1]
    document = json.loads(example[2])
    plain = {name: value for name, value in document.items() if name not in ("provenance", "first_touch")}
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert hashlib.sha256(canonical).hexdigest() == example[1]
