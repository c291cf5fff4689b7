"""Three gateways on one PostgreSQL, while random faults hit them. `SharedHistory.faults` checks the result.

PILOTFLAME_TEST_FAULTS=300 makes more faults. With at least WITH_QUEUES faults, messages of SQS and Kafka run, too. Shorter tests
leave them out, because SQS hides the messages of a dead gateway for a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import httpx
import psycopg
import pytest
from kafka_cluster import Cluster, cluster
from live import Gateway, free_port, gateway_process, short_folder
from moto_server import moto_server
from postgres import PostgresServer, new_schema, postgres_server
from receiver import Receiver, receiving
from shared_history import Order, SharedHistory, read_runs

FAULTS, WITH_QUEUES = int(os.environ.get("PILOTFLAME_TEST_FAULTS", "3")), 10
CALLERS, GATEWAYS, STOPPED_S, KEYS = 6, 3, (1.0, 30.0), 3
END_S, ASK_AGAIN_S = 240.0, 0.25
SQS_EVERY_S, KAFKA_EVERY_S = 1.0, 0.2
pytestmark = pytest.mark.timeout(180 + END_S + 40 * FAULTS)
NAME = "counted"
HANDLER = """
import json, os
def handler(event):
    with open({runs!r}, "ab", buffering=0) as file:
        file.write(json.dumps(event).encode() + b"\\n")
    return event["number"]
"""
SETTINGS: dict[str, Any] = {"idempotent": True, "attempts": 100}
GATEWAY: dict[str, Any] = {"webhook_networks": ["127.0.0.0/8"], "drain_s": 5.0}
AWS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}


class Node:
    """A gateway that can be killed, and started again on its state folder."""

    def __init__(self, folder: Path, database: str) -> None:
        self.folder, self._database, self._port = folder, database, free_port()
        self._stack = contextlib.AsyncExitStack()
        self.gateway: Gateway

    async def start(self) -> None:
        self._stack = contextlib.AsyncExitStack()
        self.gateway = await self._stack.enter_async_context(
            gateway_process(
                self.folder / "state", environ=AWS, database=self._database, port=self._port, **GATEWAY
            )
        )

    async def kill(self) -> None:
        """Kill the gateway. Its workers end with it."""
        await self._stack.aclose()

    def signal(self, number: signal.Signals) -> None:
        assert self.gateway.process is not None
        self.gateway.process.send_signal(number)


@contextlib.asynccontextmanager
async def nodes(database: str) -> AsyncIterator[list[Node]]:
    with short_folder() as folder, contextlib.ExitStack() as disks:
        made = [Node(disks.enter_context(small_disk(folder / str(one))), database) for one in range(GATEWAYS)]
        try:
            for node in made:
                await node.start()
            yield made
        finally:
            for node in made:
                await node.kill()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Make and yield a folder. It is on a small disk of its own, if the user may mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(folder)]
    mounted = not os.geteuid() and not subprocess.run(mount, capture_output=True, check=False).returncode
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Story:
    """Sends orders, as callers and queues do, while gateways fail."""

    def __init__(self, running: list[Node], receiver: Receiver, runs: Path) -> None:
        self.running, self._receiver, self._runs = running, receiver, runs
        self.history, self.ending = SharedHistory(), asyncio.Event()
        self._numbers = itertools.count()

    async def submit(self, most: float = float("inf")) -> None:
        """Submit jobs. Repeat each job under its key until a gateway has accepted it."""
        while not self.ending.is_set() and (number := next(self._numbers)) < most:
            order = Order("job", "", number)
            body = {"input": order._asdict(), "webhook": f"{self._receiver.url}/done"}
            for node in itertools.cycle(self.running[number % len(self.running) :] + self.running):
                # anyio raises AttributeError if the client is closed while it connects.
                with contextlib.suppress(httpx.TransportError, RuntimeError, AttributeError):
                    answer = await node.gateway.client.post(
                        f"/v2/{NAME}/run", json=body, headers={"Idempotency-Key": f"k{number}"}, timeout=5
                    )
                    if answer.status_code == 200:
                        self.history.jobs[number] = answer.json()["id"]
                        self.history.orders.add(order)
                        break
                    assert answer.status_code in (503, 507), answer.text
                await asyncio.sleep(0.05)

    async def feed(self, source: str, send: Callable[[str, str], object], every_s: float) -> None:
        """Send messages to a queue, with KEYS keys in turn. `send(key, text)` blocks."""
        for turn in itertools.count():
            if self.ending.is_set():
                break
            order = Order(source, f"key{turn % KEYS}", turn // KEYS)
            await asyncio.to_thread(send, order.key, json.dumps(order._asdict()))
            self.history.orders.add(order)
            await asyncio.sleep(every_s)

    async def end(self, end_s: float = END_S) -> SharedHistory:
        """Wait until the history has no faults, for at most `end_s`. Return the history."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(end_s):
                while await self._look():
                    await asyncio.sleep(ASK_AGAIN_S)
        # Look again, because a second run or webhook may follow a little later.
        await asyncio.sleep(2.0)
        await self._look()
        return self.history

    async def _look(self) -> list[str]:
        """Bring the history up to date, and return its faults as of now."""
        history, client = self.history, self.running[-1].gateway.client
        history.runs = await asyncio.to_thread(read_runs, self._runs)
        history.webhooks = [(json.loads(one.body)["data"]["id"], one.id) for one in self._receiver.came]
        for job in {*history.jobs.values()} - {*history.results}:
            found = (await client.get(f"/v2/{NAME}/status/{job}")).json()
            if found.get("status") == "COMPLETED":
                history.results[job] = found["output"]
        history.completed = (await client.get(f"/v2/{NAME}/health")).json()["jobs"]["completed"]
        return history.faults()


async def test_jobs_messages_and_webhooks_outlive_random_faults(tmp_path: Path) -> None:
    seed = int(os.environ.get("PILOTFLAME_TEST_SEED", secrets.randbelow(1 << 30)))
    print(f"PILOTFLAME_TEST_SEED={seed}")
    chosen = random.Random(seed)
    with postgres_server() as server, moto_server() as amazon, cluster() as kafka:
        async with nodes(server.url) as running, receiving() as receiver:
            story = Story(running, receiver, tmp_path / "runs")
            queue = fifo_queue(amazon)
            settings = SETTINGS | {"source": sources(queue, amazon, kafka) if FAULTS >= WITH_QUEUES else []}
            await running[0].gateway.deploy(HANDLER.format(runs=str(tmp_path / "runs")), settings, name=NAME)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(CALLERS):
                    tasks.create_task(story.submit())
                if settings["source"]:
                    tasks.create_task(story.feed("sqs", sqs_sender(queue, amazon), SQS_EVERY_S))
                    write = partial(_write, kafka)
                    tasks.create_task(story.feed("kafka", write, KAFKA_EVERY_S))
                for _ in range(FAULTS):
                    await asyncio.sleep(chosen.uniform(0.2, 2.0))
                    await _fault(chosen, running, server)
                story.ending.set()
            history = await story.end()
    assert history.faults() == []
    assert history.jobs


async def _fault(chosen: random.Random, running: list[Node], server: PostgresServer) -> None:
    node = chosen.choice(running)
    match chosen.choice(["kill", "kill", "stop", "database", "cut", "disk"]):
        case "kill":
            await node.kill()
            await node.start()
        case "stop":
            node.signal(signal.SIGSTOP)
            await asyncio.sleep(chosen.uniform(*STOPPED_S))
            node.signal(signal.SIGCONT)
        case "cut":
            await asyncio.to_thread(_cut, server.url)
        case "disk":
            await asyncio.to_thread(_fill, node.folder / "ballast")
            await asyncio.sleep(chosen.uniform(0.5, 3.0))
            (node.folder / "ballast").unlink()
        case _:
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(chosen.uniform(0.0, 2.0))
            await asyncio.to_thread(server.start)


def _cut(url: str) -> None:
    """Cut all connections to the database."""
    others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"{others} AND backend_type = 'client backend'".encode())


def _fill(ballast: Path) -> None:
    """Write 256 MiB to this file. This fills a small disk."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        for _ in range(256):
            file.write(bytes(1 << 20))


# -- queues


def fifo_queue(endpoint: str) -> str:
    with contextlib.closing(_sqs(endpoint)) as client:
        attributes = {"FifoQueue": "true", "ContentBasedDeduplication": "true"}
        url: str = client.create_queue(QueueName="orders.fifo", Attributes=attributes)["QueueUrl"]
    return url


def sqs_sender(queue: str, endpoint: str) -> Callable[[str, str], object]:
    client = _sqs(endpoint)
    return lambda key, text: client.send_message(QueueUrl=queue, MessageBody=text, MessageGroupId=key)


def sources(queue: str, endpoint: str, kafka: Cluster) -> list[dict[str, Any]]:
    return [
        {"type": "sqs", "queue": queue, "endpoint_url": endpoint},
        {"type": "kafka", "brokers": kafka.brokers, "topic": "orders", "group": "faults"},
    ]


def _write(kafka: Cluster, key: str, text: str) -> None:
    kafka.write("orders", [text], [key])


def _sqs(endpoint: str) -> Any:
    keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
    return boto3.client("sqs", endpoint_url=endpoint, region_name="us-east-1", **keys)


# -- broken databases

BREAKS = {
    "is lost": """CREATE FUNCTION breaks() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN DELETE FROM jobs WHERE number = NEW.number AND number % 5 = 0; RETURN NULL; END $$;
        CREATE TRIGGER breaks AFTER UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION breaks()""",
    "have completed": """CREATE FUNCTION breaks() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN NEW.completed := NEW.completed + (NEW.completed > OLD.completed)::int; RETURN NEW; END $$;
        CREATE TRIGGER breaks BEFORE UPDATE ON counters FOR EACH ROW EXECUTE FUNCTION breaks()""",
    "webhooks": """CREATE FUNCTION breaks() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF NEW.id NOT LIKE '%again' THEN
            NEW.id := NEW.id || 'again';
            INSERT INTO deliveries (id, subject, function, event, url, host, body, state, attempts, next_s, created_s, last_status,
                last_error, log, owner) VALUES (NEW.id, NEW.subject, NEW.function, NEW.event, NEW.url, NEW.host, NEW.body, NEW.state,
                NEW.attempts, NEW.next_s, NEW.created_s, NEW.last_status, NEW.last_error, NEW.log, NEW.owner);
        END IF; RETURN NULL; END $$;
        CREATE TRIGGER breaks AFTER INSERT ON deliveries FOR EACH ROW EXECUTE FUNCTION breaks()""",
}
"""Triggers that break the store. The key is a part of the fault that the history then has."""


@pytest.mark.parametrize("fault", BREAKS)
async def test_a_broken_store_is_found_out(fault: str, postgres: PostgresServer, tmp_path: Path) -> None:
    url = new_schema(postgres.url, f"t{secrets.token_hex(8)}")
    with short_folder() as folder:
        node = Node(folder, url)
        await node.start()
        try:
            async with receiving() as receiver:
                story = Story([node], receiver, tmp_path / "runs")
                code = HANDLER.format(runs=str(tmp_path / "runs"))
                await node.gateway.deploy(code, SETTINGS, name=NAME)
                with psycopg.connect(url, autocommit=True) as connection:
                    connection.execute(BREAKS[fault].encode())
                await story.submit(20)
                found = (await story.end(3.0)).faults()
        finally:
            await node.kill()
    assert any(fault in one for one in found), found
