"""`pilotflame snapshot push` and `convert`, and `create` and `inspect` over S3: output and files."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import boto3
import numpy as np
import pytest
from click.testing import CliRunner, Result
from moto_server import moto_server
from pilotflame.errors import SnapshotError
from pilotflame.runtime.command.commands.snapshot import snapshot
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest
from pilotflame.snapshot.format.verify import verify
from registry_server import registry
from safetensors.numpy import save_file


def run(*arguments: object) -> Result:
    return CliRunner().invoke(snapshot, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with moto_server() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="models")
    yield "s3://models/llama"
    for entry in client.list_objects_v2(Bucket="models").get("Contents", ()):
        client.delete_object(Bucket="models", Key=entry["Key"])
    client.delete_bucket(Bucket="models")
    client.close()


def test_push_to_s3_and_look_at_it_there(weights: Path, bucket: str) -> None:
    # The folder has no manifest yet: the push makes it.
    assert "pushed to s3://models/llama: 2.4 KiB in 2 files, " in run("push", weights, bucket).output
    facts = json.loads(run("push", weights, bucket, "--json").output)
    assert (facts["sent_files"], facts["kept_files"], facts["digest"]) == (
        0,
        2,
        Manifest.read(weights).digest,
    )
    shown = run("inspect", bucket).output
    assert "order of first touch not recorded" in shown
    assert "config.json" in shown
    assert "300×2" in shown
    facts = json.loads(run("inspect", f"{bucket}/{MANIFEST_NAME}", "--json").output)
    assert facts["assets"] == [{"name": "config.json", "bytes": 2}]
    assert facts["first_touch_recorded"] is False


def test_create_on_a_prefix_uploads_the_manifest_alone(weights: Path, bucket: str) -> None:
    client = boto3.client("s3")
    for name in ("model.safetensors", "config.json"):
        client.upload_file(str(weights / name), "models", f"llama/{name}")
    before = {
        entry["Key"]: entry["LastModified"] for entry in client.list_objects_v2(Bucket="models")["Contents"]
    }
    assert f"wrote {bucket}/{MANIFEST_NAME}: 2.4 KiB in 1 file and 1 asset" in run("create", bucket).output
    after = {
        entry["Key"]: entry["LastModified"] for entry in client.list_objects_v2(Bucket="models")["Contents"]
    }
    client.close()
    assert after.keys() - before.keys() == {f"llama/{MANIFEST_NAME}"}
    assert all(after[key] == at for key, at in before.items())
    run("create", weights)
    digest = json.loads(run("inspect", bucket, "--json").output)["digest"]
    assert digest == Manifest.read(weights).digest
    run("create", f"{bucket}/model.safetensors", "-o", weights / "other.json")
    assert Manifest.read(weights / "other.json").digest == digest


def test_push_to_a_registry(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_AUTH_CONFIG", "{}")
    with registry(tmp_path / "registry") as found:
        url = f"oci://{found.host}/org/net:v1"
        assert f"pushed to {url}@sha256:" in run("push", weights, url).output
        facts = json.loads(run("push", weights, url, "--json").output)
        assert (facts["sent_bytes"], facts["kept_files"]) == (0, 2)
        assert facts["destination"].startswith(f"{url}@sha256:")
        run("pull", facts["destination"], tmp_path / "pulled")
    verify(tmp_path / "pulled", Manifest.read(weights))


def test_another_snapshot_is_overwritten_by_force_only(weights: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    run("create", weights)
    run("push", weights, there)
    save_file({"second": np.ones(3, np.float32)}, weights / "model.safetensors")
    run("create", weights)
    with pytest.raises(SnapshotError, match="holds another snapshot"):
        run("push", weights, there)
    assert "in 1 file, 2 B were there" in run("push", weights, there, "--force").output
    verify(there, Manifest.read(there))


def test_convert_both_ways(weights: Path, tmp_path: Path) -> None:
    made = run("convert", weights, tmp_path / "bf16", "--dtype", "bf16").output
    assert "1 file and 1 asset, 1 tensor (1 BF16)" in made
    back = json.loads(run("convert", weights, tmp_path / "w.tensors", "--to", "tensorizer", "--json").output)
    assert back["bytes"] == 2400
    facts = json.loads(run("convert", tmp_path / "w.tensors", tmp_path / "again", "--json").output)
    assert facts["dtypes"] == {"F32": 1}
    refused = run("convert", weights, tmp_path / "x.tensors", "--to", "tensorizer", "--dtype", "bf16")
    assert refused.exit_code == 2
    assert "convert twice" in refused.output


def test_no_thread_is_left() -> None:
    assert not [thread for thread in threading.enumerate() if "snapshot" in thread.name]
