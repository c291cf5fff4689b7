"""Which credentials and addresses the queues of functions use, against moto over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto_server import moto_server
from pilotflame.addresses import Addresses
from pilotflame.errors import BusFailed
from pilotflame.runtime.jobs.events.message_queue import Identity
from pilotflame.runtime.plugins.sqs.queue import open_queue
from pilotflame.runtime.plugins.sqs.settings import SqsSource
from pilotflame.snapshot.sources.access import Access

OWN = {"AWS_ACCESS_KEY_ID": "AKIAOWNOWNOWNOWN0000", "AWS_SECRET_ACCESS_KEY": "own", "OTHER": "x"}
THEIRS = {"AWS_ACCESS_KEY_ID": "AKIAGATEWAYGATEWAY00", "AWS_SECRET_ACCESS_KEY": "hush"}


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """The endpoint of moto's server, which has the queue `orders` and the bucket `outputs`."""
    with moto_server() as endpoint:
        options: dict[str, Any] = {
            "endpoint_url": endpoint, "region_name": "us-east-1",
            "aws_access_key_id": "any", "aws_secret_access_key": "any",
        }  # fmt: skip
        queues, store = boto3.client("sqs", **options), boto3.client("s3", **options)
        queues.create_queue(QueueName="orders")
        store.create_bucket(Bucket="outputs")
        queues.close()
        store.close()
        yield endpoint


@pytest.fixture(autouse=True)
def _credentials_of_the_gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(
        "[lab]\naws_access_key_id = AKIALABLABLABLAB0000\naws_secret_access_key = k\n"
    )
    (tmp_path / "config").write_text("[profile lab]\nregion = us-east-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for name, value in THEIRS.items():
        monkeypatch.setenv(name, value)


def identity(secrets: dict[str, str], *networks: str, own_only: bool = True) -> Identity:
    return Identity(lambda: secrets, Access(own_only=own_only, addresses=Addresses.of(networks)))


def opened(endpoint: str, who: Identity, **settings: Any) -> tuple[Any, Any]:
    queue = f"{endpoint}/123456789012/orders"
    source = SqsSource(type="sqs", queue=queue, endpoint_url=endpoint, result="s3://outputs/x", **settings)
    return open_queue(source, who)


def key_of(client: Any) -> str:
    return str(client._request_signer._credentials.access_key)


async def test_a_queue_is_read_with_the_functions_own_secrets(moto: str) -> None:
    queue, sink = opened(moto, identity(OWN, "127.0.0.1"))
    assert await queue.receive(1, wait=False) == []
    assert await queue.call(key_of) == OWN["AWS_ACCESS_KEY_ID"]
    assert await sink.call(key_of) == OWN["AWS_ACCESS_KEY_ID"]
    assert await sink.call(lambda client: client.list_objects_v2(Bucket="outputs")["KeyCount"]) == 0
    await queue.close()
    await sink.close()


async def test_no_endpoint_of_the_gateway_is_used_with_the_functions_own_secrets() -> None:
    url = "https://sqs.eu-west-1.amazonaws.com/123456789012/orders"
    queue, sink = open_queue(SqsSource(type="sqs", queue=url, result="s3://outputs"), identity(OWN))
    for one in (queue, sink):
        endpoint = await one.call(lambda client: client.meta.endpoint_url)
        assert endpoint.endswith(".eu-west-1.amazonaws.com")
        await one.close()


async def test_without_secrets_nothing_is_sent_until_they_are_set(moto: str) -> None:
    secrets: dict[str, str] = {}
    queue, sink = opened(moto, identity(secrets, "127.0.0.1"))
    for one in (queue, sink):
        with pytest.raises(BusFailed, match="the function has no secret AWS_ACCESS_KEY_ID"):
            await one.call(key_of)
    secrets |= OWN
    assert await queue.receive(1, wait=False) == []
    await queue.close()


async def test_secrets_that_aws_refuses_are_read_again(moto: str) -> None:
    secrets = dict(OWN)
    queue, _ = opened(moto, identity(secrets, "127.0.0.1"))
    assert await queue.call(key_of) == OWN["AWS_ACCESS_KEY_ID"]

    def refuse(_client: Any) -> None:
        raise ClientError({"Error": {"Code": "ExpiredToken"}}, "ReceiveMessage")

    secrets["AWS_ACCESS_KEY_ID"] = "AKIANEWNEWNEWNEW0000"
    assert await queue.call(key_of) == OWN["AWS_ACCESS_KEY_ID"]
    with pytest.raises(BusFailed, match="ExpiredToken"):
        await queue.call(refuse)
    assert await queue.call(key_of) == "AKIANEWNEWNEWNEW0000"
    await queue.close()


async def test_a_profile_that_the_policy_lists_is_used(moto: str) -> None:
    queue, _ = opened(moto, identity({}, "127.0.0.1"), profile="lab")
    assert await queue.receive(1, wait=False) == []
    assert await queue.call(key_of) == "AKIALABLABLABLAB0000"
    await queue.close()


async def test_a_queue_is_at_an_allowed_address(moto: str) -> None:
    queue, sink = opened(moto, identity(OWN))
    with pytest.raises(BusFailed, match="its address may not be connected to: loopback") as caught:
        await queue.receive(1, wait=False)
    assert "PILOTFLAME_QUEUE_NETWORKS" in caught.value.remedy
    with pytest.raises(BusFailed, match="its address may not be connected to: loopback"):
        await sink.call(lambda client: client.list_objects_v2(Bucket="outputs"))
    await queue.close()
    await sink.close()


@pytest.mark.parametrize(("secrets", "used"), [({"OTHER": "x"}, THEIRS), (OWN, OWN)])
async def test_a_trusted_function_without_credentials_uses_the_gateways(
    moto: str, secrets: dict[str, str], used: dict[str, str]
) -> None:
    queue, sink = opened(moto, Identity(lambda: secrets))
    for one in (queue, sink):
        assert await one.call(key_of) == used["AWS_ACCESS_KEY_ID"]
        await one.close()
