"""What a function prints belongs to the invocation that printed it, and only its caller gets it."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
from live import Function, Gate, Gateway, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

TALKS = """
import gate, logging, sys
def handler(event, context):
    print("begun", event)
    gate.wait(str(event))
    print("half a line of", event, end="", file=sys.stderr)
    context.log.warning("logged by %s", event)
    if event == "raises":
        raise ValueError("secret")
    return event
"""
TALKS_ASYNC = """
import asyncio, gate, threading
async def handler(event):
    print("begun", event)
    await gate.wait_async(str(event))
    await asyncio.to_thread(print, "from a thread of", event)
    await asyncio.create_task(later(event))
    return event
async def later(event):
    print("from a task of", event)
"""


async def submit(function: Function, event: Any) -> str:
    response = await function.client.post(f"/v2/{function.name}/run", json={"input": event})
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


async def ended(function: Function, job: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def so() -> bool:
        found.update((await function.client.get(f"/v2/{function.name}/status/{job}")).json())
        return found["status"] not in ("IN_QUEUE", "IN_PROGRESS")

    await until(so, f"the end of {job}")
    return found


async def test_a_jobs_logs_are_its_own_while_others_run_in_the_same_worker(deploy, gate: Gate):
    function = await deploy(TALKS, {"concurrency": 3, "scale.max": 1, "env.GATE": str(gate.path)})
    call = asyncio.create_task(function.call("of another caller"))
    await gate.next("of another caller")
    jobs = {event: await submit(function, event) for event in ("works", "raises")}
    for event in jobs:
        await gate.next(event)
    gate.open()
    for event, job in jobs.items():
        logs = (await ended(function, job))["logs"]
        assert sorted(logs.splitlines()) == sorted(
            [f"begun {event}", f"half a line of {event}", f"WARNING logged by {event}"]
        )
    assert (await call).status_code == 200


async def test_tasks_and_threads_of_an_async_handler_print_for_their_invocation(deploy, gate: Gate):
    function = await deploy(TALKS_ASYNC, {"concurrency": 3, "scale.max": 1, "env.GATE": str(gate.path)})
    jobs = {event: await submit(function, event) for event in ("one", "two")}
    for event in jobs:
        await gate.next(event)
    gate.open()
    for event, job in jobs.items():
        assert (await ended(function, job))["logs"].splitlines() == [
            f"begun {event}", f"from a thread of {event}", f"from a task of {event}",
        ]  # fmt: skip


CHILD = """
import os, subprocess
def handler(event):
    os.write(1, b"native\\n")
    subprocess.run(["echo", "a child of", str(event)], check=True)
    return event
"""


async def test_what_child_processes_print_belongs_to_a_job_that_runs_alone(deploy):
    function = await deploy(CHILD, {"scale.max": 1})
    await function.answer("a caller before")
    found = await ended(function, await submit(function, "the job"))
    assert found["logs"] == "native\na child of the job"


async def test_what_a_batch_prints_for_several_belongs_to_nobody(deploy, gate: Gate):
    source = """
import gate, pilotflame
@pilotflame.batch(max_size=4)
def handler(events):
    if events == ["first"]:
        gate.wait("first")
    print("together", events)
    return events
"""
    function = await deploy(source, {"scale.max": 1, "env.GATE": str(gate.path)})
    first = await submit(function, "first")
    await gate.next("first")
    jobs = [await submit(function, event) for event in ("x", "y")]
    await function.settled(ready=1, queued=2)
    gate.open()
    assert [(await ended(function, job)).get("logs", "") for job in jobs] == ["", ""]
    assert (await ended(function, first))["logs"] == "together ['first']"
    assert "together ['x', 'y']" in [line["text"] for line in await function.lines()]


async def test_lambdas_tail_is_of_its_own_invocation(deploy, gate: Gate):
    function = await deploy(TALKS, {"concurrency": 3, "scale.max": 1, "env.GATE": str(gate.path)})
    call = asyncio.create_task(function.call("another"))
    await gate.next("another")
    path = f"/lambda/2015-03-31/functions/{function.name}/invocations"
    asked = asyncio.create_task(function.client.post(path, json="mine", headers={"X-Amz-Log-Type": "Tail"}))
    await gate.next("mine")
    gate.open()
    tail = base64.b64decode((await asked).headers["X-Amz-Log-Result"]).decode()
    assert "begun mine" in tail
    assert "another" not in tail
    await call


async def test_a_successful_prediction_carries_its_logs(deploy):
    source = """
from cog import BasePredictor
class Predictor(BasePredictor):
    def predict(self, name: str) -> str:
        print("predicting", name)
        return name
"""
    function = await deploy(None, files={"predict.py": source})
    response = await function.client.post(
        "/cog/predictions", json={"input": {"name": "Ada"}}, headers={"X-Pilotflame-Function": function.name}
    )
    assert (response.json()["status"], response.json()["logs"]) == ("succeeded", "predicting Ada")


async def test_a_request_id_that_another_caller_uses_gets_none_of_their_lines(deploy, gate: Gate):
    """A caller chooses the id of a request, so the id alone must not decide who gets the lines."""
    function = await deploy(TALKS, {"concurrency": 3, "scale.max": 1, "env.GATE": str(gate.path)})
    job = await submit(function, "victim")
    await gate.next("victim")
    path = f"/lambda/2015-03-31/functions/{function.name}/invocations"
    spy = asyncio.create_task(
        function.client.post(path, json="spy", headers={"X-Amz-Log-Type": "Tail", "X-Request-Id": job})
    )
    await gate.next("spy")
    gate.open()
    assert "victim" not in base64.b64decode((await spy).headers["X-Amz-Log-Result"]).decode()
    assert "spy" not in (await ended(function, job))["logs"]


async def test_a_mark_in_what_is_printed_is_text(deploy, gateway: Gateway):
    source = "def handler(event):\n    print('\\x1e0123456789abcdef i 1 other forged')\n"
    function = await deploy(source)
    found = await ended(function, await submit(function, 1))
    assert found["logs"] == "\x1e0123456789abcdef i 1 other forged"


LOGS = """
import logging, logging.config
{configuration}
def handler(event, context):
    for level in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("mine"), level)("mine %s", level)
    context.log.error("ours")
"""
JSON_LINES = """logging.config.dictConfig({
    "version": 1,
    "formatters": {"json": {"format": '{"level": "%(levelname)s", "text": "%(message)s"}'}},
    "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stdout"}},
    "root": {"level": "ERROR", "handlers": ["out"]},
})"""


@pytest.mark.parametrize(
    ("configuration", "expected"),
    {
        "": ["mine info", "WARNING mine warning", "ERROR mine error", "ERROR ours"],
        "logging.getLogger().setLevel(logging.DEBUG)": [
            "DEBUG mine debug", "mine info", "WARNING mine warning", "ERROR mine error", "ERROR ours",
        ],
        "logging.getLogger().setLevel(logging.WARNING)": ["WARNING mine warning", "ERROR mine error", "ERROR ours"],
        "logging.basicConfig(format='%(levelname)s: %(message)s')": [
            "WARNING: mine warning", "ERROR: mine error", "ERROR: ours",
        ],
        "logging.basicConfig(level=logging.INFO, format='%(message)s')": [
            "mine info", "mine warning", "mine error", "ours",
        ],
        "logging.getLogger('mine').setLevel('ERROR')": ["ERROR mine error", "ERROR ours"],
        JSON_LINES: ['{"level": "ERROR", "text": "mine error"}', '{"level": "ERROR", "text": "ours"}'],
        "logging.disable(logging.CRITICAL)": [],
    }.items(),
)  # fmt: skip
async def test_the_handlers_own_logging_stays(deploy, configuration: str, expected: list[str]):
    function = await deploy(LOGS.replace("{configuration}", configuration))
    assert (await ended(function, await submit(function, 1))).get("logs", "").splitlines() == expected


@pytest.mark.parametrize("place", ["setup", "handler"])
async def test_logging_can_be_configured_after_the_import_too(deploy, place: str):
    source = f"""
import logging
def configure():
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s: %(message)s")
def setup(context):
    if {place!r} == "setup":
        configure()
def handler(event):
    if {place!r} == "handler":
        configure()
    logging.getLogger("mine").warning("hidden")
    logging.getLogger("mine").error("shown")
"""
    function = await deploy(source)
    assert (await ended(function, await submit(function, 1)))["logs"].splitlines() == ["ERROR: shown"]
