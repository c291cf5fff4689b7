"""SageMaker's endpoints with boto3, and the contract of its containers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import pytest_asyncio
from botocore.config import Config
from botocore.exceptions import ClientError, EventStreamError
from live import Gate, Gateway, gateway_here, short_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    return {'got': event}\n"
TEXTS = "def handler(event):\n    return repr(event)\n"
EXTRA = "def handler(event, context):\n    return dict(context.extra)\n"
FAILS = "def handler(event):\n    raise ValueError('no good')\n"
STREAMS = "def handler(event):\n    yield 'a'\n    yield {'n': 1}\n    if event:\n        raise ValueError('no good')\n"
WAITS = "import gate\ndef handler(event):\n    yield 'first'\n    gate.wait('begun')\n    yield 'second'\n"


def client_of(url: str, *, key: str = "any", secret: str = "any") -> Any:
    """Return a client of boto3 that sends its requests to the gateway."""
    return boto3.client(
        "sagemaker-runtime", endpoint_url=f"{url}/sagemaker", region_name="us-east-1", aws_access_key_id=key,
        aws_secret_access_key=secret, config=Config(retries={"total_max_attempts": 1}, proxies={}),
    )  # fmt: skip


@pytest.fixture(scope="module")
def aws(gateway: Gateway) -> Any:
    return client_of(gateway.url)


async def invoke(client: Any, name: str, body: Any, **more: Any) -> dict[str, Any]:
    """Invoke an endpoint. In the returned response, the body is read."""

    def called() -> dict[str, Any]:
        found = dict(client.invoke_endpoint(EndpointName=name, Body=body, **more))
        return found | {"Body": found["Body"].read()}

    return await asyncio.to_thread(called)


async def refused(client: Any, name: str, body: Any = b"1", **more: Any) -> dict[str, Any]:
    """Return the response to an invocation that must be refused."""
    with pytest.raises(ClientError) as raised:
        await invoke(client, name, body, **{"ContentType": "application/json", **more})
    told: dict[str, Any] = raised.value.response
    assert told["Error"]["Message"]
    return told


def kind_of(told: dict[str, Any]) -> tuple[str, int]:
    return told["Error"]["Code"], told["ResponseMetadata"]["HTTPStatusCode"]


async def test_request_and_response(deploy: Any, aws: Any) -> None:
    function = await deploy(ECHO)
    found = await invoke(aws, function.name, json.dumps({"input": 1}), ContentType="application/json")
    assert json.loads(found["Body"]) == {"got": {"input": 1}}
    assert (found["ContentType"], found["InvokedProductionVariant"]) == ("application/json", "AllTraffic")
    assert found["ResponseMetadata"]["RequestId"]


async def test_other_types_of_bodies(deploy: Any, aws: Any) -> None:
    function = await deploy(TEXTS)
    for kind, got in (("text/csv", "'1,2'"), ("application/x-image", "b'1,2'")):
        found = await invoke(aws, function.name, "1,2", ContentType=kind, Accept="application/json")
        assert json.loads(found["Body"]) == got


async def test_parameters_reach_the_handler(deploy: Any, aws: Any) -> None:
    function = await deploy(EXTRA, {"aliases": ["blue"]})
    named = {"CustomAttributes": "trace=7", "InferenceId": "i-1", "TargetVariant": "blue"}
    found = await invoke(aws, function.name, b"1", ContentType="application/json", **named)
    extra = json.loads(found["Body"])
    assert (extra["custom_attributes"], extra["inference_id"]) == ("trace=7", "i-1")
    assert found["InvokedProductionVariant"] == "blue"


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("TargetModel", "a.tar.gz"), ("TargetContainerHostname", "h"), ("SessionId", "NEW_SESSION"), ("EnableExplanations", "`true`"),
        ("InferenceComponentName", "c"), ("TargetVariant", "green"), ("CustomAttributes", "x" * 1025),
    ],
)  # fmt: skip
async def test_parameters_that_pilotflame_does_not_have(
    deploy: Any, aws: Any, parameter: str, value: str
) -> None:
    function = await deploy(ECHO, check=False)
    if parameter == "CustomAttributes":
        path = f"/sagemaker/endpoints/{function.name}/invocations"
        headers = {"X-Amzn-SageMaker-Custom-Attributes": value}
        response = await function.client.post(path, json=1, headers=headers)
        assert response.headers["x-amzn-ErrorType"] == "ValidationError"
        return
    told = await refused(aws, function.name, **{parameter: value})
    assert kind_of(told) == ("ValidationError", 400)
    assert (parameter if parameter != "TargetVariant" else "Variant green") in told["Error"]["Message"]


async def test_errors(deploy: Any, aws: Any) -> None:
    function = await deploy(FAILS)
    told = await refused(aws, function.name)
    assert kind_of(told) == ("ModelError", 424)
    assert told["OriginalStatusCode"] == 500
    assert "no good" in told["OriginalMessage"]
    assert kind_of(await refused(aws, function.name, b"{")) == ("ValidationError", 400)
    assert kind_of(await refused(aws, "gone")) == ("ValidationError", 400)
    await function.client.post(f"/v1/functions/{function.name}/pause")
    assert kind_of(await refused(aws, function.name)) == ("ServiceUnavailable", 503)

    def asynchronous() -> Any:
        with pytest.raises(ClientError) as raised:
            aws.invoke_endpoint_async(EndpointName=function.name, InputLocation="s3://b/k")
        return raised.value.response

    told = await asyncio.to_thread(asynchronous)
    assert kind_of(told) == ("ValidationError", 400)
    assert "InvokeEndpointAsync" in told["Error"]["Message"]


def parts(client: Any, name: str, body: Any) -> tuple[list[bytes], str]:
    """Return the parts of a streamed output, and the code of the error at its end."""
    stream = client.invoke_endpoint_with_response_stream(
        EndpointName=name, Body=body, ContentType="application/json"
    )
    found = []
    try:
        found.extend(event["PayloadPart"]["Bytes"] for event in stream["Body"])
    except EventStreamError as error:
        return found, error.response["Error"]["Code"]
    return found, ""


async def test_response_streams(deploy: Any, aws: Any) -> None:
    function, whole = await deploy(STREAMS), await deploy(ECHO)
    found, error = await asyncio.to_thread(parts, aws, function.name, b"0")
    assert (b"".join(found), error) == (b'a{"n":1}\n', "")
    found, error = await asyncio.to_thread(parts, aws, function.name, b"1")
    assert (b"".join(found), error) == (b'a{"n":1}\n', "ModelStreamError")
    assert await asyncio.to_thread(parts, aws, whole.name, b"1") == ([b'{"got":1}'], "")
    # InvokeEndpoint waits for all pieces.
    assert json.loads((await invoke(aws, function.name, b"0"))["Body"]) == ["a", {"n": 1}]


async def test_parts_arrive_while_the_function_runs(deploy: Any, aws: Any, gate: Gate) -> None:
    function = await deploy(WAITS, gate=gate)

    def first() -> tuple[Any, bytes]:
        stream = aws.invoke_endpoint_with_response_stream(EndpointName=function.name, Body=b"1")
        events = iter(stream["Body"])
        return events, next(events)["PayloadPart"]["Bytes"]

    events, found = await asyncio.to_thread(first)
    assert found == b"first"
    (await gate.next("begun")).go()
    assert await asyncio.to_thread(lambda: [event["PayloadPart"]["Bytes"] for event in events]) == [b"second"]


async def test_keys_sign_and_a_function_that_the_key_does_not_cover_does_not_exist(state: Path) -> None:
    async with gateway_here(state) as gateway, gateway.at_home() as admin:
        await gateway.deploy(ECHO, name="mine")
        await gateway.deploy(ECHO, name="secret", check=False)
        key = {"name": "k", "scopes": ["invoke"], "functions": ["mine"], "aws": True}
        made = (await admin.post("/v1/keys", json=key)).json()["key"]
        client = client_of(gateway.url, key=made[3:15], secret=made[16:])
        found = await invoke(client, "mine", b"1", ContentType="application/json")
        assert json.loads(found["Body"]) == {"got": 1}
        told = [await refused(client, name) for name in ("secret", "gone")]
        assert [kind_of(one) for one in told] == [("ValidationError", 400)] * 2
        assert told[0]["Error"]["Message"].replace("secret", "gone") == told[1]["Error"]["Message"]
        stranger = client_of(gateway.url, key=made[3:15], secret="wrong")
        assert kind_of(await refused(stranger, "mine")) == ("UnrecognizedClientException", 403)


# -- the contract of containers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone() -> AsyncIterator[Gateway]:
    """A gateway that serves the paths of containers. Each test deploys its functions."""
    with short_folder() as folder:
        async with gateway_here(folder / "state", bare_paths=True) as gateway:
            yield gateway


async def test_a_container(alone: Gateway) -> None:
    assert (await alone.client.get("/ping")).status_code == 404
    await alone.deploy(ECHO, name="one")
    ping = await alone.client.get("/ping")
    assert (ping.status_code, ping.json()) == (200, {"status": "Healthy"})
    found = await alone.client.post("/invocations", json={"x": 1})
    assert (found.status_code, found.json()) == (200, {"got": {"x": 1}})
    assert (await alone.client.post("/invocations", content="{")).status_code == 400
    await alone.client.post("/v1/functions/one/pause")
    assert (await alone.client.get("/ping")).status_code == 503
    await alone.client.delete("/v1/functions/one")


async def test_a_container_whose_output_streams(alone: Gateway) -> None:
    await alone.deploy(STREAMS, name="one")
    found = await alone.client.post("/invocations", json=0)
    assert found.content == b'a{"n":1}\n'
    await alone.deploy(ECHO, name="two")
    assert (await alone.client.post("/invocations", json=0)).status_code == 422
