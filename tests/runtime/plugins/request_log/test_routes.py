"""Request logs of real functions: lines in a folder and in S3, statistics, a store that fails, and the end of a gateway."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
import pytest_asyncio
from live import Function, Gateway, failure, gateway_here, short_folder, until
from moto_server import moto_server
from pilotflame.runtime.plugins.request_log import function_log, routes, statistics
from pyarrow import parquet

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCORES = """
def handler(event):
    if event.get("fail"):
        raise ValueError(event)
    return {"score": event["age"] / 100, "name": event.get("name"), "size": "x" * event.get("size", 0)}
"""
AGE = "/input/age"
LABEL = re.compile(r'(\w+)="([^"]*)"')


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    """A gateway that soon writes calls to their store. Its statistics have small windows, and few bytes of calls may wait."""
    with pytest.MonkeyPatch.context() as patch, short_folder() as folder:
        patch.setattr(function_log, "BATCH_S", 0.02)
        patch.setattr(function_log, "FIRST_RETRY_S", 0.02)
        patch.setattr(statistics, "WINDOW", 20)
        patch.setattr(routes, "ROOM_BYTES", 1_000_000)
        async with gateway_here(folder / "state") as gateway:
            yield gateway


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Yield the endpoint of moto's S3, which has the bucket `logs`."""
    with moto_server() as endpoint:
        client(endpoint).create_bucket(Bucket="logs")
        yield endpoint


def client(endpoint: str) -> Any:
    return boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the records in a store."""
    found = [json.loads(line) for file in folder.rglob("*.jsonl") for line in file.read_text().splitlines()]
    return sorted(found, key=lambda record: str(record["at"]))


async def stored(folder: Path, count: int) -> list[dict[str, Any]]:
    """Wait until the store has this number of records, and return them."""

    async def there() -> bool:
        return len(await asyncio.to_thread(lines, folder)) >= count

    await until(there, f"{count} records in {folder}")
    return lines(folder)


async def metrics(gateway: Gateway, function: Function) -> dict[tuple[str, ...], float]:
    """Return the metrics of a function's request log. The key has the name and the other labels."""
    found = dict[tuple[str, ...], float]()
    for line in (await gateway.client.get("/metrics")).text.splitlines():
        name, labels = line.partition("{")[0].removeprefix("pilotflame_"), dict(LABEL.findall(line))
        if name.startswith(("request_log", "value")) and labels.pop("function", "") == function.name:
            found[name, *sorted(labels.values(), reverse=True)] = float(line.rpartition(" ")[2])
    return found


async def counted(gateway: Gateway, function: Function, written: int) -> None:
    """Wait until the metrics count `written` calls, and check that no call was dropped. A call counts after the store has it."""

    async def told() -> bool:
        return (await metrics(gateway, function))["request_log_written_total",] >= written

    await until(told, f"{written} written calls in the metrics")
    found = await metrics(gateway, function)
    assert (found["request_log_written_total",], found["request_log_dropped_total",]) == (written, 0)


async def secrets(gateway: Gateway, function: Function, endpoint: str) -> None:
    values = {
        "AWS_ACCESS_KEY_ID": "AKIAOWNOWNOWNOWN0000", "AWS_SECRET_ACCESS_KEY": "own",
        "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1",
    }  # fmt: skip
    for name, value in values.items():
        path = f"/v1/functions/{function.name}/secrets/{name}"
        response = await gateway.client.put(path, json={"value": value})
        assert response.status_code < 300, response.text


async def test_calls_are_lines_without_the_redacted_fields(deploy, gateway: Gateway, tmp_path: Path):
    settings = {"request_log.store": str(tmp_path), "request_log.redact": "name,/input/user/*"}
    function = await deploy(SCORES, settings)
    await function.answer(
        {"age": 40, "name": "Ada", "user": {"mail": "a@b"}, "list": [{"Name": "Bob"}]}, X_Request_Id="mine"
    )
    assert (await function.error({"fail": True}))["status"] == 500
    await gateway.client.post(function.path, content=b"raw", headers={"Content-Type": "text/plain"})
    job = await gateway.client.post(f"/v2/{function.name}/run", json={"input": {"age": 7}})
    assert job.status_code == 200, job.text
    first, failed, raw, queued = await stored(tmp_path, 4)
    assert first["input"] == {
        "age": 40,
        "name": "[redacted]",
        "user": {"mail": "[redacted]"},
        "list": [{"Name": "[redacted]"}],
    }
    assert first["output"] == {"score": 0.4, "name": "[redacted]", "size": ""}
    assert (first["function"], first["request_id"], first["status"], first["error"]) == (
        function.name,
        "mine",
        200,
        None,
    )
    assert first["revision"] == function.described["revision"]
    assert first["seconds"] > 0
    assert (failed["status"], failed["error"], failed["output"]) == (500, "handler_failed", None)
    assert (raw["input"], raw["input_bytes"]) == (None, 3)
    assert (queued["source"], queued["input"], queued["output"]["score"]) == ("job", {"age": 7}, 0.07)
    assert "Ada" not in "".join(file.read_text() for file in tmp_path.rglob("*.jsonl"))
    await counted(gateway, function, 4)


async def test_batches_go_to_s3_with_the_secrets_of_the_function(deploy, gateway: Gateway, endpoint: str):
    function = await deploy(SCORES, {"request_log.store": "s3://logs/calls"}, check=False)
    await secrets(gateway, function, endpoint)
    await asyncio.gather(*(function.answer({"age": age}) for age in range(20)))

    def records() -> list[dict[str, Any]]:
        store = client(endpoint)
        keys = [
            one["Key"]
            for one in store.list_objects_v2(Bucket="logs", Prefix=f"calls/{function.name}/").get(
                "Contents", ()
            )
        ]
        bodies = [store.get_object(Bucket="logs", Key=key)["Body"].read() for key in keys]
        assert all(key.endswith(".jsonl") for key in keys)
        return [json.loads(line) for body in bodies for line in body.splitlines()]

    async def complete() -> bool:
        return len(await asyncio.to_thread(records)) == 20

    await until(complete, "20 records")
    assert sorted(record["input"]["age"] for record in records()) == list(range(20))


async def test_a_store_that_fails_slows_no_call_and_its_calls_are_counted(deploy, gateway: Gateway):
    with socket.socket() as silent:
        # The store accepts connections, but never answers a request.
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        function = await deploy(SCORES, {"request_log.store": "s3://logs/calls"}, check=False)
        await secrets(gateway, function, f"http://127.0.0.1:{silent.getsockname()[1]}")
        await function.answer({"age": 1})
        for _ in range(20):
            # The call must not wait for the store. The limit is long, because a busy machine may take seconds.
            async with asyncio.timeout(20):
                await function.answer({"age": 1, "size": 100_000})
        found = await metrics(gateway, function)
        assert found["request_log_written_total",] == 0
        # Calls of at most 1,000,000 bytes may wait, and one function may not use all of that.
        assert found["request_log_dropped_total",] >= 10


async def test_a_store_that_does_not_answer_holds_up_no_end_of_a_gateway(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(function_log, "LAST_WRITE_S", 0.1)
    monkeypatch.setattr(function_log, "BATCH_S", 0.01)
    with socket.socket() as silent, short_folder() as folder:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        silent.setblocking(False)
        async with gateway_here(folder / "state") as gateway:
            function = await gateway.deploy(SCORES, {"request_log.store": "s3://logs/calls"}, check=False)
            await secrets(gateway, function, f"http://127.0.0.1:{silent.getsockname()[1]}")
            await function.answer({"age": 1})
            # Accept the connection: the write of the first call has begun.
            connection, _ = await asyncio.get_running_loop().sock_accept(silent)
            await function.answer({"age": 2})
        connection.close()
    assert not [text for text in caplog.messages if "is cancelled" in text]


async def test_a_failed_write_is_repeated_and_said(deploy, gateway: Gateway, tmp_path: Path):
    store = tmp_path / "store"
    store.write_text("not a folder")
    function = await deploy(SCORES, {"request_log.store": str(store)})
    await function.answer({"age": 1})
    assert "request_log.store: " in (await function.logged("request_log.store"))["text"]
    store.unlink()
    assert (await stored(store, 1))[0]["input"] == {"age": 1}
    found = await metrics(gateway, function)
    assert found["request_log_failures_total",] >= 1
    await counted(gateway, function, 1)


async def test_numbers_have_statistics_which_a_deploy_keeps(deploy, gateway: Gateway):
    settings = {
        "request_log.statistics": "/input/age,/output/score,/output/name",
        "request_log.redact": "/output/score",
    }
    function = await deploy(SCORES, settings)
    for age in range(20):
        await function.answer({"age": age})
    # The new revision continues the statistics of the function.
    await deploy(SCORES.replace("event[", "2 * event["), settings, name=function.name)
    for age in range(20):
        await function.answer({"age": age + 50})

    async def complete() -> bool:
        return (await metrics(gateway, function)).get(("value_count_total", AGE)) == 40

    await until(complete, "40 ages")
    found = await metrics(gateway, function)
    assert found["value_mean", AGE] == pytest.approx(34.5)
    assert 15 < found["value_quantile", "0.5", AGE] < 55
    assert found["value_shift", AGE] > 1
    # The score, which is redacted, and the name, which is no number, have no statistics.
    assert {key[-1] for key in found if key[0].startswith("value")} == {AGE}


async def test_without_settings_and_after_their_end_nothing_is_written(
    deploy, gateway: Gateway, tmp_path: Path
):
    function = await deploy(SCORES, {"request_log.store": str(tmp_path)})
    await function.answer({"age": 1})
    await deploy(SCORES, {}, name=function.name)
    await function.answer({"age": 2})
    assert [record["input"]["age"] for record in await stored(tmp_path, 1)] == [1]
    assert await metrics(gateway, function) == {}


async def test_a_gateway_that_ends_writes_the_calls_that_wait(tmp_path: Path):
    with short_folder() as folder:
        async with gateway_here(folder / "state") as gateway:
            function = await gateway.deploy(
                SCORES, {"request_log.store": str(tmp_path), "request_log.sample": 0.5}
            )
            await asyncio.gather(*(function.answer({"age": age}) for age in range(100)))
        assert 20 < len(lines(tmp_path)) < 80
        # A restored function has its log again.
        async with gateway_here(folder / "state") as gateway:
            await asyncio.gather(*(gateway.function(function.name).answer({"age": 200}) for _ in range(20)))
        assert any(record["input"]["age"] == 200 for record in lines(tmp_path))


async def test_parquet_files_have_the_records(deploy, gateway: Gateway, tmp_path: Path):
    settings = {
        "request_log.store": str(tmp_path),
        "request_log.format": "parquet",
        "request_log.redact": "name",
    }
    function = await deploy(SCORES, settings)
    for age in range(3):
        await function.answer({"age": age, "name": "Ada"})
    assert (await function.error({"fail": True}))["status"] == 500

    async def complete() -> bool:
        return (await metrics(gateway, function))["request_log_written_total",] == 4

    await until(complete, "4 calls in files")
    files = list((tmp_path / function.name).rglob("*.parquet"))
    rows = [row for file in files for row in (await asyncio.to_thread(parquet.read_table, file)).to_pylist()]
    *answered, failed = sorted(rows, key=lambda row: row["at"])
    assert [json.loads(row["input"]) for row in answered] == [
        {"age": age, "name": "[redacted]"} for age in range(3)
    ]
    assert (failed["status"], failed["error"], failed["output"]) == (500, "handler_failed", None)
    assert datetime.now(UTC) - failed["at"] < timedelta(minutes=5)


@pytest.mark.parametrize(
    ("settings", "extra", "package"),
    [
        ({"request_log.statistics": AGE}, "statistics", "fastdigest"),
        ({"request_log.store": "/var/log/calls", "request_log.format": "parquet"}, "parquet", "pyarrow"),
    ],
)
async def test_a_deploy_without_the_package_fails_and_names_the_extra(
    settings: dict[str, str], extra: str, package: str, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, package, None)
    error = failure(await gateway.send(SCORES, settings, name="missing"))
    assert error["type"] == "package_missing"
    assert f"needs {package}, which is not installed" in error["message"]
    assert f"pip install 'pilotflame[{extra}]'" in error["remedy"]


async def test_a_gateway_that_starts_without_the_package_says_so_and_calls_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    settings = {"request_log.store": str(tmp_path), "request_log.format": "parquet"}
    with short_folder() as folder:
        async with gateway_here(folder / "state") as gateway:
            function = await gateway.deploy(SCORES, settings)
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        async with gateway_here(folder / "state") as gateway:
            function = gateway.function(function.name)
            assert "pip install 'pilotflame[parquet]'" in (await function.logged("pyarrow"))["text"]
            assert (await function.answer({"age": 1}))["score"] == 0.01
