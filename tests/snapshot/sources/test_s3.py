"""S3 as a source, against moto over HTTP: credentials, errors, overwritten objects, listing, writing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from fault_server import Faults, FaultServer
from moto.s3.models import s3_backends
from moto_server import moto_server, reset
from pilotflame.errors import (
    PilotflameError,
    SnapshotChanged,
    SourceDenied,
    SourceError,
    SourceMissing,
    SourceUnavailable,
)
from pilotflame.snapshot.format.discover import find_manifest
from pilotflame.snapshot.sources import source as source_module
from pilotflame.snapshot.sources.s3 import S3Source
from safetensors.torch import save
from source_tests import OBJECTS, SourceTests, read

DATA = random.Random(5).randbytes(300_000)
KEY, SECRET = "AKIAEXAMPLEEXAMPLE00", "hush/secret+key"


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.upper().startswith(("AWS_", "BOTO_", "PILOTFLAME_"))]:
        monkeypatch.delenv(name)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """The endpoint of moto's server."""
    with moto_server() as endpoint:
        yield endpoint


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set credentials in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def store(moto: str, keys: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """boto3's client of an empty store with bucket `weights`; the environment points there."""
    del keys
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", moto)
    client = boto3.client("s3")
    client.create_bucket(Bucket="weights")
    yield client
    reset(moto)
    client.close()


@pytest.fixture
def open_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., S3Source]:
    """Return a function that sets the endpoint in the environment and returns a source: `open_at(endpoint, url)`."""

    def open_source(endpoint: str, url: str = "s3://weights") -> S3Source:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        return S3Source(url)

    return open_source


class TestS3Source(SourceTests):
    @pytest.fixture
    def source(self, store: Any) -> S3Source:
        for name, data in OBJECTS.items():
            store.put_object(Bucket="weights", Key=f"my models/é+/{name}", Body=data)
        return S3Source("s3://weights/my models/é+")


def test_ranges_are_read_with_credentials_of_the_environment(store: Any) -> None:
    store.put_object(Bucket="weights", Key="llama/model.safetensors", Body=DATA)
    source = S3Source("s3://weights/llama/")
    info = source.stat("model.safetensors")
    assert info.size_bytes == len(DATA)
    assert info.version == store.head_object(Bucket="weights", Key="llama/model.safetensors")["ETag"]
    assert read(source, "model.safetensors", 1000, 777) == DATA[777:1777]
    assert source.url == "s3://weights/llama"


def test_a_profile_brings_credentials_endpoint_and_region(
    store: Any, moto: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_object(Bucket="weights", Key="f", Body=DATA)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(f"[profile lab]\nregion = eu-west-1\nendpoint_url = {moto}\n")
    (tmp_path / "credentials").write_text(
        f"[lab]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "lab")
    source = S3Source("s3://weights")
    url = source.locate("f", fresh=False).url
    assert url.startswith(f"{moto}/weights/f?"), "path style"
    assert "eu-west-1" in url
    assert read(source, "f", 100) == DATA[:100]
    with pytest.raises(SourceMissing, match="s3://weights/missing: there is no such key"):
        source.stat("missing")
    monkeypatch.setenv("AWS_PROFILE", "gone")
    with pytest.raises(SourceDenied, match="ProfileNotFound"):
        S3Source("s3://weights").stat("f")


def test_what_is_missing_is_named(store: Any) -> None:
    with pytest.raises(
        SourceMissing, match=r"s3://nowhere/a/b: there is no such bucket \(NoSuchBucket\)"
    ) as caught:
        S3Source("s3://nowhere/a").stat("b")
    assert caught.value.details["code"] == "NoSuchBucket"
    with pytest.raises(SourceMissing, match=r"s3://weights/a/b: there is no such key \(NoSuchKey\)"):
        S3Source("s3://weights/a").stat("b")
    with pytest.raises(SourceMissing, match="NoSuchBucket"):
        S3Source("s3://nowhere").names()
    with pytest.raises(SourceMissing, match="NoSuchBucket"):
        S3Source("s3://nowhere").put("f", b"1")


def test_listing_goes_over_pages_and_is_relative(store: Any) -> None:
    for number in range(1003):
        # Put the object into moto's memory. This makes the test 4 s faster than requests over HTTP.
        s3_backends["123456789012"]["aws"].put_object("weights", f"p/{number:04}", b"")
    store.put_object(Bucket="weights", Key="p/folder/", Body=b"")
    store.put_object(Bucket="weights", Key="pq/other", Body=b"")
    names = S3Source("s3://weights/p").names()
    assert len(names) == 1003
    assert names[:2] == ["0000", "0001"]
    assert "p/0000" in S3Source("s3://weights").names()


def test_a_listing_without_end_is_given_up(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deploy that names a whole bucket would otherwise list it for hours, in the gateway's memory."""
    monkeypatch.setattr(source_module, "LISTED_AT_MOST", 3)
    for number in range(4):
        store.put_object(Bucket="weights", Key=f"p/{number}", Body=b"")
    store.put_object(Bucket="weights", Key="p/model.safetensors", Body=save({"a": torch.ones(3)}))
    source = S3Source("s3://weights/p")
    with pytest.raises(SourceError, match="more than 3 objects"):
        source.names()
    # Weights under a usual name are found nevertheless.
    assert [shard.name for shard in find_manifest(source).shards] == ["model.safetensors"]


def test_objects_uploaded_in_parts_keep_their_version(store: Any, tmp_path: Path) -> None:
    data = random.Random(6).randbytes(9 << 20)
    (tmp_path / "f").write_bytes(data)
    sent: list[int] = []
    source = S3Source("s3://weights/x")
    source.put("f", tmp_path / "f", sent.append)
    info = source.stat("f")
    assert info.version.endswith('-2"'), "not in parts"
    assert read(source, "f", len(data)) == data
    assert sum(sent) == len(data)


def test_an_overwritten_object_has_changed(store: Any) -> None:
    store.put_object(Bucket="weights", Key="f", Body=DATA)
    source = S3Source("s3://weights")
    source.stat("f")
    store.put_object(Bucket="weights", Key="f", Body=DATA[::-1])
    with pytest.raises(SnapshotChanged, match="weights/f changed") as caught:
        read(source, "f", 100)
    assert caught.value.details["object"] == "f"
    assert read(source, "f", 100) == DATA[::-1][:100]


def test_an_overwrite_in_a_versioned_bucket_is_a_change_too(store: Any) -> None:
    store.put_bucket_versioning(Bucket="weights", VersioningConfiguration={"Status": "Enabled"})
    store.put_object(Bucket="weights", Key="f", Body=DATA)
    connection = S3Source("s3://weights").connect()
    version = connection.begin("f", 0, 10).version
    store.put_object(Bucket="weights", Key="f", Body=DATA[::-1])
    with pytest.raises(SnapshotChanged, match="weights/f changed"):
        connection.begin("f", 10, 30, version)
    connection.close()


def test_a_private_bucket_refuses_strangers_and_says_why(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_object(Bucket="weights", Key="f", Body=DATA)
    store.put_object(Bucket="weights", Key="open", Body=DATA, ACL="public-read")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    source = S3Source("s3://weights")
    assert source.stat("open").size_bytes == len(DATA)
    with pytest.raises(SourceDenied, match=r"s3://weights/f: .*anonymously, since no credentials were found"):
        source.stat("f")


# -- errors that moto does not have: a server with the responses of S3


def refusing(status: int, code: str, extra: str = "", **headers: str) -> Faults:
    return Faults(status=status, body=f"<Error><Code>{code}</Code>{extra}</Error>", headers=headers)


@pytest.mark.parametrize(
    ("status", "code", "error", "words"),
    [
        (403, "AccessDenied", SourceDenied, "access is denied, requested with the credentials of the environment"),
        (400, "ExpiredToken", SourceDenied, "token has expired"),
        (403, "InvalidAccessKeyId", SourceDenied, "access key is unknown"),
        (403, "SignatureDoesNotMatch", SourceDenied, "signature does not match"),
        (403, "RequestTimeTooSkewed", SourceDenied, "clock"),
        (403, "InvalidObjectState", SourceDenied, "archived"),
        (404, "NoSuchBucket", SourceMissing, "no such bucket"),
        (404, "NoSuchKey", SourceMissing, "no such key"),
        (412, "PreconditionFailed", SnapshotChanged, "changed"),
        (416, "InvalidRange", SnapshotChanged, "shorter"),
        (503, "SlowDown", SourceUnavailable, "too many requests"),
        (500, "InternalError", SourceUnavailable, "failed"),
        (400, "RequestTimeout", SourceUnavailable, "waited too long"),
        (400, "SomethingNew", SourceError, "SomethingNew"),
        (503, "SomethingNew", SourceUnavailable, "SomethingNew"),
    ],
)  # fmt: skip
def test_error_codes_become_errors(
    keys: None,
    open_at: Callable[..., S3Source],
    status: int,
    code: str,
    error: type[PilotflameError],
    words: str,
) -> None:
    with FaultServer({}, refusing(status, code, **{"Retry-After": "3"})) as server:
        connection = open_at(server.url, "s3://weights/p").connect()
        with pytest.raises(error, match=words) as caught:
            connection.begin("f", 0, 10)
        connection.close()
    assert type(caught.value) is error
    assert "s3://weights/p/f" in caught.value.message
    assert code in caught.value.message
    assert caught.value.remedy
    wire = repr(caught.value.to_wire())
    assert KEY not in wire
    assert SECRET not in wire
    assert "X-Amz" not in wire
    if isinstance(caught.value, SourceUnavailable):
        assert caught.value.retry_after_s == 3.0


def test_an_endless_error_body_is_cut_off(keys: None, open_at: Callable[..., S3Source]) -> None:
    with FaultServer({}, Faults(status=403, body="x" * (1 << 20) + "<Code>NoSuchKey</Code>")) as server:
        connection = open_at(server.url).connect()
        with pytest.raises(SourceDenied):
            connection.begin("f", 0, 10)
        connection.close()


def test_rotated_credentials_are_taken_up_by_signing_anew(
    keys: None, open_at: Callable[..., S3Source]
) -> None:
    def faults(request: Any) -> Faults:
        # The first signature expires after one use.
        old = first[0] if first else first.append(request.target) or request.target
        return refusing(400, "ExpiredToken") if request.number and request.target == old else Faults()

    first: list[str] = []
    with FaultServer({"weights/f": DATA}, faults) as server:
        source = open_at(server.url)
        source.stat("f")
        source._client().boto._request_signer._credentials.access_key = "AKIAROTATED"
        assert read(source, "f", 100) == DATA[:100]
        assert [("AKIAROTATED" in request.target) for request in server.requests] == [False, False, True]


@pytest.mark.parametrize(("status", "code"), [(400, "ExpiredToken"), (403, "InvalidAccessKeyId")])
def test_credentials_that_were_replaced_outside_are_read_again(
    open_at: Callable[..., S3Source], monkeypatch: pytest.MonkeyPatch, status: int, code: str
) -> None:
    monkeypatch.setattr("pilotflame.snapshot.sources.s3.RENEWED_AFTER_S", 0.0)
    credentials = Path(os.environ["AWS_SHARED_CREDENTIALS_FILE"])

    def write(key: str) -> None:
        credentials.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {SECRET}\n")

    def faults(request: Any) -> Faults:
        return Faults() if "AKIANEW" in request.target else refusing(status, code)

    write("AKIAOLD")
    with FaultServer({"weights/f": DATA}, faults) as server:
        source = open_at(server.url)
        source.locate("f", fresh=True)
        write("AKIANEW")
        assert read(source, "f", 100) == DATA[:100]


def test_a_bucket_elsewhere_is_asked_in_its_region_or_named(
    keys: None, open_at: Callable[..., S3Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultServer(
        {}, refusing(301, "PermanentRedirect", **{"x-amz-bucket-region": "eu-north-1"})
    ) as server:
        connection = open_at(server.url).connect()
        with pytest.raises(SourceError, match="another region \\(eu-north-1\\)"):
            connection.begin("f", 0, 10)
        connection.close()
        source = open_at(server.url)
        source._move("eu-north-1")
        assert source._region is None
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    source = S3Source("s3://weights")
    assert "us-east-1" in source.locate("f", fresh=True).url
    source._move("eu-north-1")
    assert "https://weights.s3.eu-north-1.amazonaws.com/f?" in source.locate("f", fresh=True).url


@pytest.mark.parametrize("how", ["environment", "nothing"])
def test_anonymous_requests_are_not_signed(
    how: str,
    open_at: Callable[..., S3Source],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if how != "nothing":
        request.getfixturevalue("keys")
    if how == "environment":
        monkeypatch.setenv("PILOTFLAME_S3_ANONYMOUS", "1")
    with FaultServer({"weights/f": DATA}) as server:
        source = open_at(server.url)
        assert read(source, "f", 100) == DATA[:100]
        assert all(asked.target == "/weights/f" for asked in server.requests)
        server.faults = refusing(403, "AccessDenied")
        words = (
            "anonymously, since no credentials were found"
            if how == "nothing"
            else "anonymously, as configured"
        )
        with pytest.raises(SourceDenied, match=words):
            source.stat("g")


def test_a_store_that_cannot_be_reached_is_unavailable(
    keys: None, open_at: Callable[..., S3Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with FaultServer({}) as server:
        url = server.url
    with pytest.raises(SourceUnavailable, match="EndpointConnectionError"):
        open_at(url).names()


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "weights/x", "s3://me:hush@weights/x"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(SourceError, match="not a URL of S3") as caught:
        S3Source(url)
    assert "hush" not in str(caught.value)


# -- credentials of a function, requester pays, access points

OWN = {
    "AWS_ACCESS_KEY_ID": "AKIAOWNOWNOWNOWN0000",
    "AWS_SECRET_ACCESS_KEY": "own/secret",
    "AWS_SESSION_TOKEN": "own-token",
}


def test_the_secrets_of_a_function_count_alone(
    store: Any, moto: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store.put_object(Bucket="weights", Key="f", Body=DATA)
    # The settings of this process would fail, and must not be mixed with the function's own.
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_PROFILE", "gone")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "the-gateways-token")
    (tmp_path / "config").write_text("[profile lab]\nregion = eu-west-1\n")
    source = S3Source(
        "s3://weights", {**OWN, "AWS_ENDPOINT_URL": moto, "AWS_REGION": "eu-west-3", "TOKEN": "x"}
    )
    url = source.locate("f", fresh=False).url
    assert url.startswith(f"{moto}/weights/f?")
    for part in (OWN["AWS_ACCESS_KEY_ID"], "eu-west-3", "own-token"):
        assert part in url
    assert "gateways" not in url
    assert read(source, "f", 100) == DATA[:100]
    assert source.names() == ["f"]


def test_an_endpoint_of_a_function_gets_no_credentials_of_the_gateway(
    keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    del keys
    with FaultServer({"weights/f": DATA}) as server:
        monkeypatch.setenv("AWS_SESSION_TOKEN", "the-gateways-token")
        source = S3Source("s3://weights", {"AWS_ENDPOINT_URL": server.url})
        assert read(source, "f", 100) == DATA[:100]
        assert server.requests
        for request in server.requests:
            assert "?" not in request.target
            assert "authorization" not in request.headers


@pytest.mark.parametrize("own", [False, True])
def test_who_asks_may_pay(store: Any, moto: str, monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    store.put_object(Bucket="weights", Key="f", Body=DATA)
    secrets = {**OWN, "AWS_ENDPOINT_URL": moto, "PILOTFLAME_S3_REQUESTER_PAYS": "1"} if own else {}
    if not own:
        monkeypatch.setenv("PILOTFLAME_S3_REQUESTER_PAYS", "1")
    source = S3Source("s3://weights", secrets)
    location = source.locate("f", fresh=False)
    assert "X-Amz-SignedHeaders=host%3Bx-amz-request-payer" in location.url
    assert location.headers == {"x-amz-request-payer": "requester"}
    assert read(source, "f", 100) == DATA[:100]
    assert source.names() == ["f"]
    other = S3Source("s3://weights", {**OWN, "AWS_ENDPOINT_URL": moto}).locate("f", fresh=False)
    assert "request-payer" not in other.url
    assert not other.headers


def test_an_access_point_is_a_bucket(keys: None) -> None:
    del keys
    arn = "arn:aws:s3:eu-west-2:123456789012:accesspoint/models"
    source = S3Source(f"s3://{arn}/llama/8b")
    url = source.locate("model.safetensors", fresh=False).url
    assert url.startswith(
        "https://models-123456789012.s3-accesspoint.eu-west-2.amazonaws.com/llama/8b/model.safetensors?"
    )
    assert source.url == f"s3://{arn}/llama/8b"


def test_boto3_is_imported_only_where_something_is_read() -> None:
    code = "import sys, pilotflame.snapshot.sources.s3; sys.exit('boto3' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
