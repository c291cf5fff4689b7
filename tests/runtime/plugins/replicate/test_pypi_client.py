"""The `replicate` package of PyPI against a gateway with API keys."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import replicate
import standardwebhooks
from live import Gate, Gateway, until
from receiver import receiving
from replicate.exceptions import ModelError, ReplicateError
from replicate.webhook import InvalidSignatureError, Webhooks

from .conftest import FILES, STREAM

pytestmark = pytest.mark.asyncio(loop_scope="module")


@contextlib.asynccontextmanager
async def opened(gateway: Gateway, token: str) -> AsyncIterator[replicate.Client]:
    client = replicate.Client(api_token=token, base_url=f"{gateway.url}/replicate")
    yield client
    # The client has no method that closes its connections.
    await client._async_client.aclose()
    await asyncio.to_thread(client._client.close)


@pytest_asyncio.fixture(loop_scope="module")
async def client(
    gateway: Gateway, key: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[replicate.Client]:
    monkeypatch.setenv("REPLICATE_POLL_INTERVAL", "0.05")
    async with opened(gateway, await key()) as found:
        yield found


async def test_run(client: replicate.Client, predictor: Callable[..., Any]) -> None:
    function = await predictor()
    for reference in (f"me/{function.name}", f"me/{function.name}:{function.name}"):
        assert await client.async_run(reference, {"text": "so", "times": 2}) == "soso"
    assert await asyncio.to_thread(client.run, f"me/{function.name}", {"text": "so"}) == "so"
    with pytest.raises(ModelError, match="no such text"):
        await client.async_run(f"me/{function.name}", {"text": "raise"})
    # With `wait=False`, the client polls.
    assert await client.async_run(f"me/{function.name}", {"text": "so"}, wait=False) == "so"


async def test_run_that_outlasts_its_wait(
    client: replicate.Client, predictor: Callable[..., Any], gate: Gate
) -> None:
    function = await predictor(gate=gate)
    running = asyncio.ensure_future(
        client.async_run(f"me/{function.name}:{function.name}", {"text": "wait"}, wait=1)
    )
    arrival = await gate.next("wait")
    # The wait of one second ends first, and the client polls.
    await asyncio.sleep(1.2)
    arrival.go()
    assert await running == "wait"


async def test_a_prediction(client: replicate.Client, predictor: Callable[..., Any], gate: Gate) -> None:
    function = await predictor(gate=gate)
    prediction = await client.predictions.async_create(version=function.name, input={"text": "wait"})
    assert (prediction.status, prediction.version) in (
        ("starting", function.name),
        ("processing", function.name),
    )
    assert prediction.model.endswith(f"/{function.name}")
    await gate.next("wait")

    async def runs() -> bool:
        await prediction.async_reload()
        return bool(prediction.status == "processing")

    await until(runs, "a prediction that runs")
    await prediction.async_cancel()
    assert prediction.status == "canceled"
    page = await client.predictions.async_list()
    assert [one.id for one in page.results][:1] == [prediction.id]
    assert (await client.predictions.async_get(prediction.id)).input == {"text": "wait"}


async def test_a_model_and_a_deployment(client: replicate.Client, predictor: Callable[..., Any]) -> None:
    function = await predictor()
    model = await client.models.async_get(f"me/{function.name}")
    assert (model.owner, model.name) == ("me", function.name)
    assert model.latest_version is not None
    schemas = model.latest_version.openapi_schema["components"]["schemas"]
    assert schemas["Input"]["properties"]["times"]["maximum"] == 3
    assert schemas["Output"] == {"title": "Output", "type": "string"}
    deployment = await client.deployments.async_get(f"me/{function.name}")
    prediction = await deployment.predictions.async_create({"text": "a"})
    await prediction.async_wait()
    assert prediction.output == "a"
    prediction = await client.models.predictions.async_create(
        model=f"me/{function.name}", input={"text": "b"}
    )
    await prediction.async_wait()
    assert prediction.metrics is not None
    assert (prediction.output, prediction.metrics["predict_time"] >= 0) == ("b", True)
    assert function.name in [one.name for one in (await client.models.async_list()).results]


async def test_streams(client: replicate.Client, predictor: Callable[..., Any]) -> None:
    function = await predictor(STREAM)
    told = [one async for one in await client.async_stream(f"me/{function.name}", {"text": "once upon"})]
    assert "".join(str(one) for one in told) == "once\n upon\n "
    assert told[-1].event.value == "done"
    run = await client.async_run(f"me/{function.name}:{function.name}", {"text": "once upon"})
    assert [piece async for piece in run] == ["once\n ", "upon\n "]
    with pytest.raises(RuntimeError, match="in the middle"):
        async for _ in await client.async_stream(f"me/{function.name}", {"text": "then raise"}):
            pass


async def test_files(client: replicate.Client, predictor: Callable[..., Any], tmp_path: Path) -> None:
    function = await predictor()
    (tmp_path / "in.txt").write_text("content")
    output = await client.async_run(f"me/{function.name}", {"text": "a ", "image": tmp_path / "in.txt"})
    assert output == "a content.txt"
    file = await client.files.async_create(io.BytesIO(b"more"), filename="x.md", metadata={"k": 1})
    assert (file.name, file.size, file.metadata) == ("x.md", 4, {"k": 1})
    assert (
        await client.async_run(f"me/{function.name}", {"text": "b ", "image": file.urls["get"]})
        == "b more.md"
    )
    assert file.id in [one.id for one in await client.files.async_list()]
    assert (await client.files.async_get(file.id)).checksums == file.checksums
    assert await client.files.async_delete(file.id)
    with pytest.raises(ReplicateError, match="no file"):
        await client.files.async_get(file.id)
    with pytest.raises(ReplicateError, match="not there"):
        await client.async_run(f"me/{function.name}", {"text": "b ", "image": file.urls["get"]})
    output = await client.async_run(f"me/{(await predictor(FILES)).name}", {})
    assert await output.aread() == b"from a file"


async def test_the_account_and_its_hardware(
    gateway: Gateway, client: replicate.Client, predictor: Callable[..., Any]
) -> None:
    account = await client.accounts.async_current()
    assert (account.type, account.username) == ("user", "pilotflame")
    assert account.name != "pilotflame"
    function = await predictor()
    assert "cpu" in [one.sku for one in await client.hardware.async_list()]
    for number in (1, 2):
        release = (await client.deployments.async_get(f"me/{function.name}")).current_release
        assert (release.number, release.configuration.hardware) == (number, "cpu")
        if number == 1:
            await gateway.deploy(None, {"scale.max": 3}, files={"predict.py": STREAM}, name=function.name)
    assert release.configuration.max_instances == 3


async def test_the_default_secret_verifies_webhooks_of_this_key(
    gateway: Gateway, client: replicate.Client, key: Callable[..., Any], predictor: Callable[..., Any]
) -> None:
    function = await predictor()
    secret = await client.webhooks.default.async_secret()
    async with opened(gateway, await key()) as stranger:
        other = await stranger.webhooks.default.async_secret()
    async with receiving() as receiver:
        hook = {"webhook": receiver.url, "webhook_events_filter": ["completed"]}
        await client.predictions.async_create(function.name, {"text": "a"}, **hook)
        (came,) = await receiver.received(1)
    sent = {"headers": came.headers, "body": came.body.decode()}
    Webhooks.validate(**sent, secret=secret)
    own = (await gateway.client.get(f"/v1/functions/{function.name}/webhooks/secret")).json()["secret"]
    standardwebhooks.Webhook(own).verify(came.body.decode(), came.headers)
    assert len({secret.key, other.key, own}) == 3
    with pytest.raises(InvalidSignatureError):
        Webhooks.validate(**sent, secret=other)


async def test_trainings_do_not_exist(client: replicate.Client, predictor: Callable[..., Any]) -> None:
    function = await predictor()
    version = (f"me/{function.name}", function.name, {})
    for call in (
        lambda: client.trainings.async_create(*version, destination="me/new"),
        lambda: client.trainings.async_get("1"), client.trainings.async_list, lambda: client.trainings.async_cancel("1"),
    ):  # fmt: skip
        with pytest.raises(ReplicateError, match="Trainings do not exist") as refused:
            await call()
        assert refused.value.status == 404


async def test_errors(gateway: Gateway, client: replicate.Client, predictor: Callable[..., Any]) -> None:
    function = await predictor()
    with pytest.raises(ReplicateError) as unknown:
        await client.async_run("me/none", {})
    assert (unknown.value.status, unknown.value.title) == (404, "Not Found")
    async with opened(gateway, "pf_no") as stranger:
        with pytest.raises(ReplicateError) as refused:
            await stranger.async_run(f"me/{function.name}", {})
    assert refused.value.status == 401
    with pytest.raises(ModelError, match="times"):
        await client.async_run(f"me/{function.name}", {"text": "a", "times": 9})
