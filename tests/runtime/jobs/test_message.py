"""Webhook messages of each event, for receivers of Standard Webhooks and of RunPod."""

import base64
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.jobs.job import JobState
from pilotflame.runtime.jobs.message import body
from receiver import job


def message(event: str, now_s: float = 104.5, **fields: Any) -> dict[str, Any]:
    found = json.loads(body(job(**fields), event, now_s))
    assert found["type"] == f"job.{event}"
    assert found["timestamp"] == "1970-01-01T00:01:44.500Z"
    without = {key: value for key, value in found.items() if key not in ("type", "timestamp", "data")}
    assert {**without, "error": None} == {**found["data"], "error": None}
    return found


def test_the_start() -> None:
    found = message("start", started_s=102.0, worker="w-1")
    assert found["data"] == {
        "id": "job-1", "status": "IN_PROGRESS", "function": "f", "delayTime": 2000, "executionTime": 2500, "workerId": "w-1",
    }  # fmt: skip


def test_the_end_of_a_job_that_succeeded() -> None:
    found = message(
        "completed", state=JobState.COMPLETED, started_s=101.0, ended_s=103.5, output=b'{"a": [1]}'
    )
    assert found["output"] == {"a": [1]}
    assert (found["status"], found["delayTime"], found["executionTime"]) == ("COMPLETED", 1000, 2500)


def test_an_output_that_is_not_json() -> None:
    found = message("completed", state=JobState.COMPLETED, output=b"\xff\x00", output_type="image/png")
    assert base64.b64decode(found["output"]) == b"\xff\x00"
    assert found["output_type"] == "image/png"


def test_the_end_of_a_job_that_failed() -> None:
    error = {"type": "handler_failed", "message": "It broke."}
    found = message("completed", state=JobState.FAILED, error=error, logs="Traceback", ended_s=103.0)
    assert found["error"] == "It broke."
    assert found["data"]["error"] == error
    assert found["data"]["logs"] == "Traceback"
    assert "output" not in found
    assert (found["delayTime"], found["executionTime"]) == (3000, 0)


def test_the_progress() -> None:
    found = message("output", progress=b'"half"', pieces=3)
    assert found["output"] == "half"
    assert found["pieces"] == 3


@given(st.sampled_from(JobState), st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 1e9), st.text())
def test_every_job_has_a_message(
    state: JobState, started: float, ended: float, now: float, worker: str
) -> None:
    worker = worker.encode("utf-8", "ignore").decode()
    found = json.loads(body(job(state=state, started_s=started, ended_s=ended, worker=worker), "logs", now))
    assert found["delayTime"] >= 0
    assert found["executionTime"] >= 0
    assert found["workerId"] == worker
