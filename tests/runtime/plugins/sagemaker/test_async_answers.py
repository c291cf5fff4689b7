"""InvokeEndpointAsync with boto3 and moto's S3: inputs, answers, errors, and a gateway that starts again."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import pytest_asyncio
from botocore.config import Config
from botocore.exceptions import ClientError
from live import Function, Gate, Gateway, gateway_here, short_folder, until
from moto_server import moto_server
from pilotflame.errors import JobStoreFailed
from pilotflame.runtime.ground.access.deploy_policy import DeployPolicies, DeployPolicy
from pilotflame.runtime.jobs.stored.job import Job
from pilotflame.runtime.plugins.sagemaker import async_answers, objects
from pilotflame.runtime.plugins.sagemaker.async_answers import AsyncAnswers
from pilotflame.runtime.plugins.sagemaker.pending_answers import FOLDER, PendingAnswer
from round_robin import SeveralGateways

pytestmark = pytest.mark.asyncio(loop_scope="module")
ECHO = "def handler(event):\n    if event == 'fail':\n        raise ValueError('no good')\n    return {'got': event}\n"
WAITS = "import gate\ndef handler(event):\n    gate.wait('begun')\n    return 1\n"
PLACES = {
    "env.SAGEMAKER_ASYNC_INPUT": "s3://data/in",
    "env.SAGEMAKER_ASYNC_OUTPUT": "s3://data/out/",
}
KEYS = {"region_name": "us-east-1", "aws_access_key_id": "any", "aws_secret_access_key": "any"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with moto_server() as found:
        yield found


@pytest.fixture(scope="module")
def store(endpoint: str) -> Iterator[Any]:
    client = boto3.client("s3", endpoint_url=endpoint, **KEYS)
    client.create_bucket(Bucket="data")
    client.put_object(Bucket="data", Key="in/1.json", Body=b'{"n": 1}', ContentType="application/json")
    client.put_object(Bucket="data", Key="private/1.json", Body=b"1")
    yield client
    client.close()


async def with_secrets(function: Function, endpoint: str) -> Function:
    """Store the secrets with which a function uses S3."""
    secrets = {"AWS_ACCESS_KEY_ID": "own", "AWS_SECRET_ACCESS_KEY": "own", "AWS_ENDPOINT_URL": endpoint}
    for name, value in secrets.items():
        path = f"/v1/functions/{function.name}/secrets/{name}"
        assert (await function.client.put(path, json={"value": value})).status_code < 300
    return function


@pytest_asyncio.fixture(loop_scope="module")
async def echo(deploy: Any, endpoint: str, store: Any) -> AsyncIterator[Function]:
    yield await with_secrets(await deploy(ECHO, PLACES), endpoint)


def client_of(gateway: Gateway) -> Any:
    config = Config(retries={"total_max_attempts": 1}, proxies={})
    return boto3.client("sagemaker-runtime", endpoint_url=f"{gateway.url}/sagemaker", config=config, **KEYS)


async def submit(gateway: Gateway, function: Function, **named: Any) -> dict[str, Any]:
    client = client_of(gateway)
    found = await asyncio.to_thread(client.invoke_endpoint_async, EndpointName=function.name, **named)
    return dict(found)


async def refused(gateway: Gateway, function: Function, **named: Any) -> str:
    with pytest.raises(ClientError) as raised:
        await submit(gateway, function, **named)
    assert raised.value.response["Error"]["Code"] == "ValidationError"
    return str(raised.value.response["Error"]["Message"])


async def written(store: Any, url: str) -> Any:
    """Wait until an object is there, and return its JSON."""
    key, found = url.removeprefix("s3://data/"), list[Any]()

    def read() -> bool:
        try:
            found.append(json.loads(store.get_object(Bucket="data", Key=key)["Body"].read()))
        except store.exceptions.NoSuchKey:
            return False
        return True

    await until(lambda: asyncio.to_thread(read), url)
    return found[0]


async def test_an_answer_is_written(gateway: Gateway, echo: Function, store: Any) -> None:
    told = await submit(gateway, echo, InputLocation="s3://data/in/1.json", InferenceId="mine")
    assert (told["ResponseMetadata"]["HTTPStatusCode"], told["InferenceId"]) == (202, "mine")
    assert told["OutputLocation"].startswith("s3://data/out/")
    assert await written(store, told["OutputLocation"]) == {"got": {"n": 1}}
    await forgotten(gateway)


async def has_failed(gateway: Gateway, function: Function) -> None:
    """Wait until an answer could not be written."""

    async def told() -> bool:
        return (
            "could not be written" in (await gateway.client.get(f"/v1/functions/{function.name}/logs")).text
        )

    await until(told, "a failed write")


async def forgotten(gateway: Gateway) -> None:
    """Wait until no answer is left to write."""

    async def empty() -> bool:
        return not await asyncio.to_thread(pending, gateway)

    await until(empty, "no pending answer")


def pending(gateway: Gateway) -> list[str]:
    """Return the jobs whose answers are not written yet."""
    if isinstance(gateway, SeveralGateways):
        return [str(job) for (job,) in gateway.rows("SELECT job FROM pending_answers")]
    return [file.stem for file in (gateway.state / FOLDER).iterdir()]


async def test_a_replay_of_a_written_job_writes_it_again(
    gateway: Gateway, echo: Function, store: Any
) -> None:
    path, headers = f"/sagemaker/endpoints/{echo.name}/async-invocations", {"Idempotency-Key": "one"}
    places = []
    for _ in range(2):
        response = await gateway.client.post(path, json=1, headers=headers)
        places.append(response.headers["X-Amzn-SageMaker-OutputLocation"])
        assert await written(store, places[-1]) == {"got": 1}
        await forgotten(gateway)
        store.delete_object(Bucket="data", Key=places[-1].removeprefix("s3://data/"))
    assert places[0] == places[1]


async def test_a_replay_after_the_last_try_writes_the_answer(
    gateway: Gateway, endpoint: str, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pause after the last try would keep the replay from being written.
    monkeypatch.setattr(async_answers, "TRIES", 1)
    monkeypatch.setattr(async_answers, "FIRST_PAUSE_S", 3600.0)
    function = await with_secrets(await gateway.deploy(ECHO, PLACES, name="late"), "http://127.0.0.1:1")
    path, headers = f"/sagemaker/endpoints/{function.name}/async-invocations", {"Idempotency-Key": "late"}
    assert (await gateway.client.post(path, json=1, headers=headers)).status_code == 202
    await has_failed(gateway, function)
    await with_secrets(function, endpoint)
    response = await gateway.client.post(path, json=1, headers=headers)
    assert await written(store, response.headers["X-Amzn-SageMaker-OutputLocation"]) == {"got": 1}
    await forgotten(gateway)


async def test_a_large_answer_is_written_whole(gateway: Gateway, echo: Function, store: Any) -> None:
    text = "x" * (3 << 20)
    path = f"/sagemaker/endpoints/{echo.name}/async-invocations"
    response = await gateway.client.post(path, json=text)
    found = await written(store, response.headers["X-Amzn-SageMaker-OutputLocation"])
    assert found == {"got": text}


async def test_the_error_of_a_job_is_written(gateway: Gateway, echo: Function, store: Any) -> None:
    path = f"/sagemaker/endpoints/{echo.name}/async-invocations"
    response = await gateway.client.post(path, json="fail")
    assert response.status_code == 202
    error = await written(store, response.headers["X-Amzn-SageMaker-FailureLocation"])
    assert "no good" in error["Message"]


@pytest.mark.parametrize(
    ("named", "fault"),
    [
        ({"InputLocation": "s3://data/private/1.json"}, "not below the function's prefix"),
        ({"InputLocation": "s3://data/in/none"}, "none"),
        ({"InputLocation": "s3://data/in/1.json", "RequestTTLSeconds": 99_999}, "RequestTTLSeconds"),
        ({"InputLocation": "s3://data/in/1.json", "S3OutputPathExtension": "x"}, "S3OutputPathExtension"),
        ({"InputLocation": "s3://data/in/1.json", "Accept": "text/csv"}, "Accept"),
        ({}, "no InputLocation"),
    ],
)
async def test_what_is_refused(gateway: Gateway, echo: Function, named: dict[str, Any], fault: str) -> None:
    if not named:
        path = f"/sagemaker/endpoints/{echo.name}/async-invocations"
        assert fault in (await gateway.client.post(path)).json()["Message"]
        return
    assert fault in await refused(gateway, echo, **named)


async def test_a_function_without_secrets_or_places_is_refused(gateway: Gateway, deploy: Any) -> None:
    location = {"InputLocation": "s3://data/in/1.json"}
    assert "no secret AWS_ACCESS_KEY_ID" in await refused(
        gateway, await deploy(ECHO, PLACES, check=False), **location
    )
    assert "no place for the answers" in await refused(gateway, await deploy(ECHO, check=False), **location)


async def test_places_that_the_policy_does_not_list_are_refused(
    gateway: Gateway, echo: Function, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gateway.server is not None
    functions, location = gateway.server.functions, {"InputLocation": "s3://data/in/1.json"}
    for queues, refusal in (
        ((), "env.SAGEMAKER_ASYNC_OUTPUT"),
        (("s3://data/out/*",), "env.SAGEMAKER_ASYNC_INPUT"),
    ):
        narrow = DeployPolicies(DeployPolicy(kind="trusted", queues=queues))
        monkeypatch.setattr(functions, "policies", narrow)
        assert f"does not allow the place in {refusal}" in await refused(gateway, echo, **location)
    listed = DeployPolicy(kind="trusted", queues=("s3://data/in", "s3://data/out/*"))
    monkeypatch.setattr(functions, "policies", DeployPolicies(listed))
    told = await submit(gateway, echo, **location)
    assert await written(store, told["OutputLocation"]) == {"got": {"n": 1}}


@contextlib.asynccontextmanager
async def silent_store() -> AsyncIterator[tuple[str, asyncio.Queue[None]]]:
    """Yield the address of a store that accepts connections and never answers, and a queue with an item for each connection."""
    begun, stop = asyncio.Queue[None](), asyncio.Event()

    async def stay_silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.put_nowait(None)
        await stop.wait()
        writer.close()

    async with await asyncio.start_server(stay_silent, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        try:
            yield f"http://{host}:{port}", begun
        finally:
            stop.set()


async def test_a_store_that_never_answers_holds_up_its_own_function_only(
    gateway: Gateway, deploy: Any, echo: Function, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "CALL_S", 0.5)
    many = objects.MAX_READS + 4
    body = {"X-Amzn-SageMaker-InputLocation": "s3://data/in/1.json"}
    async with silent_store() as (dead, begun):
        stuck = await with_secrets(await deploy(ECHO, PLACES), dead)
        path = f"/sagemaker/endpoints/{stuck.name}/async-invocations"
        async with asyncio.TaskGroup() as group:
            reads = [group.create_task(gateway.client.post(path, headers=body)) for _ in range(many)]
            # Answers for the dead store, more than are written at the same time.
            for _ in range(objects.MAX_WRITES + 2):
                assert (await gateway.client.post(path, json=1)).status_code == 202
        assert {one.result().status_code for one in reads} == {503}
        assert "has not answered within 0.5 s" in reads[0].result().json()["Message"]
        monkeypatch.setattr(objects, "CALL_S", 30.0)
        told = await submit(gateway, echo, InputLocation="s3://data/in/1.json")
        assert await written(store, told["OutputLocation"]) == {"got": {"n": 1}}
        # Each call keeps its thread until the store has answered, so no more calls than these have begun.
        for _ in range(objects.MAX_READS + objects.MAX_WRITES):
            await begun.get()
        assert begun.empty()
        await gateway.client.delete(f"/v1/functions/{stuck.name}")


async def test_a_job_that_cannot_be_read_holds_up_no_other(
    gateway: Gateway, echo: Function, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, failed = AsyncAnswers._ended, list[str]()

    async def fails_once(answers: AsyncAnswers, pending: PendingAnswer) -> Job:
        if not failed:
            failed.append(pending.job)
            raise JobStoreFailed("The disk is gone.")
        return await ended(answers, pending)

    async def has_failed() -> bool:
        return bool(failed)

    monkeypatch.setattr(AsyncAnswers, "_ended", fails_once)
    path = f"/sagemaker/endpoints/{echo.name}/async-invocations"
    assert (await gateway.client.post(path, json=1)).status_code == 202
    await until(has_failed, "a delivery that fails")
    told = await submit(gateway, echo, InputLocation="s3://data/in/1.json")
    assert await written(store, told["OutputLocation"]) == {"got": {"n": 1}}

    async def alone() -> bool:
        return await asyncio.to_thread(pending, gateway) == failed

    await until(alone, "only the answer of the job that could not be read")
    if isinstance(gateway, SeveralGateways):
        gateway.rows("DELETE FROM pending_answers RETURNING job")
    else:
        (gateway.state / FOLDER / f"{failed[0]}.json").unlink()


async def test_the_next_owner_of_a_name_writes_no_answer_of_the_last_one(
    gateway: Gateway, endpoint: str, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_answers, "FIRST_PAUSE_S", 0.5)
    first = await with_secrets(await gateway.deploy(ECHO, PLACES, name="passed-on"), "http://127.0.0.1:1")
    path = f"/sagemaker/endpoints/{first.name}/async-invocations"
    response = await gateway.client.post(path, json=1)
    assert response.status_code == 202, response.text
    await has_failed(gateway, first)
    assert (await gateway.client.delete(f"/v1/functions/{first.name}")).status_code == 200
    await with_secrets(await gateway.deploy(ECHO, PLACES, name="passed-on"), endpoint)
    await forgotten(gateway)
    key = response.headers["X-Amzn-SageMaker-OutputLocation"].removeprefix("s3://data/")
    with pytest.raises(store.exceptions.NoSuchKey):
        store.get_object(Bucket="data", Key=key)


async def test_a_gateway_that_starts_again_writes_the_answer(
    state: Path, endpoint: str, store: Any, gate: Gate
) -> None:
    async with gateway_here(state, drain_s=0.2) as gateway:
        function = await with_secrets(await gateway.deploy(WAITS, PLACES, name="waits", gate=gate), endpoint)
        told = await submit(gateway, function, InputLocation="s3://data/in/1.json")
        await gate.next("begun")
    gate.open()
    async with gateway_here(state):
        assert await written(store, told["OutputLocation"]) == 1


async def test_another_gateway_writes_the_answer_of_one_that_has_ended(
    postgres_url: str, endpoint: str, store: Any, gate: Gate
) -> None:
    with short_folder() as folder, short_folder() as other:
        async with gateway_here(other / "state", database=postgres_url):
            async with gateway_here(folder / "state", drain_s=0.2, database=postgres_url) as gateway:
                waits = await gateway.deploy(WAITS, PLACES, name="waits", gate=gate)
                function = await with_secrets(waits, endpoint)
                told = await submit(gateway, function, InputLocation="s3://data/in/1.json")
                await gate.next("begun")
            gate.open()
            assert await written(store, told["OutputLocation"]) == 1
