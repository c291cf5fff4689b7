"""Predictions: preferences, requests, and jobs as Cog describes them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import BadInput, InputInvalid
from pilotflame.runtime.front.http.requests import load_json, parse_preferences, validate
from pilotflame.runtime.jobs.stored.job import EVENTS, Job, JobState, Webhook
from pilotflame.runtime.plugins.cog.routes import preferred_wait
from pilotflame.runtime.plugins.predictions.prediction import FORM, STATUSES, prediction_of
from pilotflame.runtime.plugins.predictions.requests import PredictionRequest

# -- preferences


@pytest.mark.parametrize(
    ("lines", "wait_s"),
    [
        ([], None), (["respond-async"], 0.0), (["Respond-Async; x=1"], 0.0), (["wait=5"], 5.0), (['wait = "5"'], 5.0),
        (["respond-async, wait=5"], 5.0), (["respond-async", "wait=5"], 5.0), (["wait=0"], 0.0), (["wait=99999"], 300.0),
        (["wait=x", "return=minimal"], None), (["wait"], None), (["wait=5", "wait=7"], 5.0), (["wait=٣"], None),
    ],
)  # fmt: skip
def test_preferences(lines: list[str], wait_s: float | None):
    assert preferred_wait(parse_preferences(lines)) == wait_s


@given(st.lists(st.text(max_size=30), max_size=3))
def test_any_preference_is_parsed(lines: list[str]):
    wait_s = preferred_wait(parse_preferences(lines))
    assert wait_s is None or 0 <= wait_s <= 300


# -- requests


def parse(body: bytes) -> PredictionRequest:
    return validate(PredictionRequest, load_json(body), "", InputInvalid)


def test_defaults() -> None:
    request = parse(b"{}")
    assert (request.input, request.id, request.fields(None, "", {})) == ({}, None, {"wanted_id": ""})


@pytest.mark.parametrize(
    ("more", "events"),
    [
        ("", EVENTS),
        (', "webhook_events_filter": []', EVENTS),
        (', "webhook_events_filter": ["start"], "unknown": 1', ("start",)),
    ],
)
def test_the_filter_chooses_the_events_of_the_webhook(more: str, events: tuple[str, ...]) -> None:
    request = parse(f'{{"webhook": "http://here"{more}}}'.encode())
    assert request.fields(None, "", {})["webhook"] == Webhook("http://here", events, FORM)


def test_an_invalid_request_is_refused_with_its_field() -> None:
    with pytest.raises(InputInvalid, match="webhook_events_filter"):
        parse(b'{"webhook_events_filter": ["never"]}')
    with pytest.raises(BadInput):
        parse(b"{")


# -- jobs as predictions


def job(state: JobState, **fields: Any) -> Job:
    return Job("job-1", "f", state, b'{"n": 1}', "", "", 0, 1.0, 1.0, 3, 1_700_000_000.0, **fields)


def as_told(one: Job, pieces: tuple[bytes, ...] = ()) -> dict[str, Any]:
    return dict(orjson.loads(orjson.dumps(prediction_of(one, pieces))))


def test_every_state_has_a_status() -> None:
    assert set(STATUSES) == set(JobState)
    assert as_told(job(JobState.IN_QUEUE)) == {
        "id": "job-1", "version": "f", "status": "starting", "input": {"n": 1}, "output": None, "error": None,
        "logs": "", "metrics": {}, "created_at": "2023-11-14T22:13:20+00:00", "started_at": None,
        "completed_at": None, "webhook": None,
    }  # fmt: skip


def test_a_final_prediction() -> None:
    times = {"started_s": 1_700_000_001.0, "ended_s": 1_700_000_003.5}
    hook = Webhook("https://example.com/")
    told = as_told(job(JobState.FAILED, error={"message": "no"}, logs="last words", webhook=hook, **times))
    assert (told["status"], told["error"], told["logs"]) == ("failed", "no", "last words")
    assert (told["metrics"], told["webhook"]) == (
        {"predict_time": 2.5, "total_time": 3.5},
        "https://example.com/",
    )
    assert datetime.fromisoformat(told["completed_at"]).timestamp() == 1_700_000_003.5
    assert as_told(job(JobState.COMPLETED, output=b"[1]", **times))["output"] == [1]
    assert (
        as_told(job(JobState.COMPLETED, output=b"\xff", output_type="x/y", **times))["output"]
        == "data:x/y;base64,/w=="
    )
    assert as_told(job(JobState.COMPLETED, output=b"text", output_type="x/y", **times))["output"] == "text"


def test_a_running_prediction_shows_its_pieces() -> None:
    assert as_told(job(JobState.IN_PROGRESS, started_s=1.0), (b"1", b'"a"'))["output"] == [1, "a"]
    assert as_told(job(JobState.IN_PROGRESS, started_s=1.0, progress=b'"half"'))["output"] == "half"
    # The error of an earlier attempt is not shown while the job waits for the next attempt.
    assert as_told(job(JobState.IN_QUEUE, error={"message": "no"}))["error"] is None


def test_an_input_of_another_type_is_not_shown() -> None:
    bytes_job = Job("job-1", "f", JobState.IN_QUEUE, b"\xff", "image/png", "", 0, 1.0, 1.0, 3, 1.0)
    assert as_told(bytes_job)["input"] is None
