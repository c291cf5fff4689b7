"""Predictions over real HTTP, as clients of Cog make them."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Any

import httpx
import pytest
from live import LIMIT_S, WAITS_ASYNC, Function, Gate, Gateway, failure, gateway_here, until
from pilotflame.runtime.plugins.cog import routes

pytestmark = pytest.mark.asyncio(loop_scope="module")

DOUBLES = "def handler(event):\n    return {'twice': event['n'] * 2}\n"
WAITS = "import gate\ndef handler(event):\n    gate.wait(str(event))\n    return event\n"
STREAMS = "def handler(event):\n    for n in range(event):\n        yield {'n': n}\n"
COG = """
from cog import BasePredictor, Input

class Predictor(BasePredictor):
    def setup(self):
        self.word = "hello "

    def predict(self, name: str, times: int = Input(default=1, ge=1, le=3)) -> str:
        if name == "nobody":
            raise ValueError("nobody is there")
        return self.word + name * times
"""


class Predictor:
    """Calls a function at the routes of Cog."""

    def __init__(self, function: Function) -> None:
        self.function = function

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        named.setdefault("X-Pilotflame-Function", self.function.name)
        return await self.function.client.request(method, path, json=body, headers=named)

    async def post(self, event: Any, **more: Any) -> httpx.Response:
        headers = {key: more.pop(key) for key in ("Prefer", "Accept") if key in more}
        return await self.ask("POST", "/cog/predictions", {"input": event, **more}, **headers)

    async def look(self, prediction: str) -> dict[str, Any]:
        response = await self.ask("GET", f"/cog/predictions/{prediction}")
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def reached(self, prediction: str, status: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def so() -> bool:
            found.update(await self.look(prediction))
            return bool(found["status"] == status)

        await until(so, f"{prediction} {status}")
        return found


def events(text: str) -> list[tuple[str, Any]]:
    """Return (event, data) of each event in a stream. Skip the comments."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


# -- a prediction


async def test_the_caller_waits_for_a_prediction(deploy):
    predictor = Predictor(await deploy(DOUBLES))
    response = await predictor.post({"n": 21})
    assert response.status_code == 200
    found = response.json()
    assert found["status"] == "succeeded"
    assert (found["input"], found["output"], found["error"]) == ({"n": 21}, {"twice": 42}, None)
    assert found["version"] == predictor.function.name
    assert found["metrics"]["predict_time"] >= 0
    times = [datetime.fromisoformat(found[f"{what}_at"]) for what in ("created", "started", "completed")]
    assert times == sorted(times)
    assert await predictor.look(found["id"]) == found


async def test_a_failure_is_data(deploy):
    predictor = Predictor(await deploy(DOUBLES))
    response = await predictor.post({})
    assert response.status_code == 200
    assert response.json()["status"] == "failed"
    assert "KeyError" in response.json()["error"]


async def test_a_predictor_of_cog_is_called_as_cog_calls_it(gateway: Gateway):
    response = await gateway.send(None, files={"predict.py": COG}, name="cogs")
    assert response.status_code == 201, response.text
    predictor = Predictor(gateway.function("cogs"))
    assert (await predictor.post({"name": "you", "times": 2})).json()["output"] == "hello youyou"
    error = failure(await predictor.post({"name": "you", "times": 9}))
    assert (error["status"], error["type"]) == (422, "input_invalid")
    assert "times" in json.dumps(error)
    assert (await predictor.post({"name": "nobody"})).json()["error"].endswith("nobody is there")
    await gateway.client.delete("/v1/functions/cogs")


async def test_not_waiting(deploy, gate: Gate):
    predictor = Predictor(await deploy(WAITS, gate=gate))
    response = await predictor.post(1, Prefer="respond-async")
    assert response.status_code == 202
    found = response.json()
    assert found["status"] in ("starting", "processing")
    assert found["completed_at"] is None
    arrival = await gate.next("1")
    assert (await predictor.reached(found["id"], "processing"))["started_at"]
    arrival.go()
    assert (await predictor.reached(found["id"], "succeeded"))["output"] == 1


async def test_a_prediction_that_has_started(deploy, gate: Gate, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routes, "START_S", LIMIT_S)
    predictor = Predictor(await deploy(WAITS, gate=gate))
    found = (await predictor.post(1, Prefer="respond-async")).json()
    assert (found["status"], found["started_at"] is not None) == ("processing", True)
    gate.open()


async def test_waiting_for_a_while(deploy, gate: Gate):
    predictor = Predictor(await deploy(WAITS, gate=gate))
    response = await predictor.post(1, Prefer="wait=1")
    assert response.status_code == 202
    (await gate.next("1")).go()
    assert (await predictor.reached(response.json()["id"], "succeeded"))["output"] == 1
    gate.open()
    assert (await predictor.post(2, Prefer="respond-async, wait=60")).status_code == 200


async def test_a_caller_that_disconnects_cancels_its_prediction(deploy, gate: Gate):
    predictor = Predictor(await deploy(WAITS_ASYNC, gate=gate))
    waiting = asyncio.ensure_future(predictor.ask("PUT", "/cog/predictions/mine-1", {"input": 1}))
    await gate.next("begun")
    waiting.cancel()
    await gate.next("cancelled")
    found = await predictor.reached("mine-1", "canceled")
    assert found["completed_at"]


async def test_a_second_caller_that_disconnects_does_not_cancel(deploy, gate: Gate):
    predictor = Predictor(await deploy(WAITS, gate=gate))
    assert (await predictor.ask("PUT", "/cog/predictions/mine-2", {"input": 1}, Prefer="respond-async")).status_code == 202  # fmt: skip
    arrival = await gate.next("1")
    with pytest.raises(httpx.ReadTimeout):
        await predictor.function.client.put(
            "/cog/predictions/mine-2", json={"input": 1}, timeout=0.3,
            headers={"X-Pilotflame-Function": predictor.function.name},
        )  # fmt: skip
    arrival.go()
    assert (await predictor.reached("mine-2", "succeeded"))["output"] == 1


# -- with an id


async def test_the_same_request_is_the_same_prediction(deploy):
    predictor = Predictor(await deploy(DOUBLES))
    first = await predictor.ask("PUT", "/cog/predictions/order-7", {"input": {"n": 1}})
    again = await predictor.ask("PUT", "/cog/predictions/order-7", {"input": {"n": 1}, "id": "order-7"})
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.json() == again.json()
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    error = failure(await predictor.ask("PUT", "/cog/predictions/order-7", {"input": {"n": 2}}))
    assert (error["status"], error["type"]) == (409, "idempotency_conflict")
    assert (await predictor.post({"n": 1}, id="order-7")).json() == first.json()


async def test_the_same_key_is_the_same_prediction(deploy):
    predictor = Predictor(await deploy(DOUBLES))
    found = [
        await predictor.ask("POST", "/cog/predictions", {"input": {"n": n}}, Idempotency_Key="once")
        for n in (2, 2, 3)
    ]
    assert [one.status_code for one in found] == [200, 200, 409]
    assert found[0].json()["id"] == found[1].json()["id"]
    assert [one.headers.get("Idempotent-Replayed") for one in found] == [None, "true", None]
    assert failure(found[2])["type"] == "idempotency_conflict"


async def test_an_id_belongs_to_one_function(deploy):
    one, other = Predictor(await deploy(DOUBLES)), Predictor(await deploy(DOUBLES))
    assert (await one.ask("PUT", "/cog/predictions/shared", {"input": {"n": 1}})).status_code == 200
    error = failure(await other.ask("PUT", "/cog/predictions/shared", {"input": {"n": 1}}))
    assert (error["status"], error["type"]) == (409, "job_conflict")


@pytest.mark.parametrize("wanted", ["a b", "job-1", "x" * 129, "ä"])
async def test_invalid_ids_are_refused(deploy, wanted: str):
    predictor = Predictor(await deploy(DOUBLES))
    assert failure(await predictor.ask("PUT", f"/cog/predictions/{wanted}", {"input": 1}))["status"] == 422
    assert failure(await predictor.post(1, id=wanted))["status"] == 422
    assert failure(await predictor.ask("GET", f"/cog/predictions/{wanted}"))["type"] == "unknown_job"


async def test_cancelling(deploy, gate: Gate):
    predictor = Predictor(await deploy(WAITS, gate=gate))
    found = (await predictor.post(1, Prefer="respond-async")).json()
    await gate.next("1")
    response = await predictor.ask("POST", f"/cog/predictions/{found['id']}/cancel")
    assert (response.status_code, response.json()["status"]) == (200, "canceled")
    again = await predictor.ask("POST", f"/cog/predictions/{found['id']}/cancel")
    assert again.json() == response.json()
    assert failure(await predictor.ask("POST", "/cog/predictions/none/cancel"))["status"] == 404


# -- streams


async def test_a_stream_of_events(deploy):
    predictor = Predictor(await deploy(STREAMS))
    response = await predictor.post(3, Accept="text/event-stream")
    assert response.status_code == 200
    assert response.headers["Content-Type"] == "text/event-stream"
    told = events(response.text)
    assert [name for name, _ in told] == ["start", "output", "output", "output", "completed"]
    assert told[0][1]["status"] == "processing"
    assert [data for name, data in told if name == "output"] == [
        {"chunk": {"n": n}, "index": n} for n in range(3)
    ]
    last = told[-1][1]
    assert (last["status"], last["output"]) == ("succeeded", [{"n": 0}, {"n": 1}, {"n": 2}])
    again = await predictor.ask("GET", f"/cog/predictions/{last['id']}", Accept="text/event-stream", Last_Event_ID="2")  # fmt: skip
    assert [data["index"] for name, data in events(again.text) if name == "output"] == [2]


async def test_a_stream_of_a_handler_that_does_not_stream(deploy):
    predictor = Predictor(await deploy(DOUBLES))
    told = events((await predictor.post({"n": 1}, Accept="text/event-stream")).text)
    assert told[1] == ("output", {"chunk": {"twice": 2}, "index": 0})
    failed = events((await predictor.post({}, Accept="text/event-stream")).text)
    assert [name for name, _ in failed if name != "log"] == ["start", "completed"]
    assert failed[-1][1]["status"] == "failed"


async def test_pieces_of_a_stream_are_shown_while_it_runs(deploy, gate: Gate):
    source = (
        "import gate\ndef handler(event):\n    yield 1\n    yield 2\n    gate.wait('half')\n    yield 3\n"
    )
    predictor = Predictor(await deploy(source, gate=gate))
    found = (await predictor.post(None, Prefer="respond-async")).json()
    arrival = await gate.next("half")

    async def half() -> bool:
        return bool((await predictor.look(found["id"]))["output"] == [1, 2])

    await until(half, "half of the output")
    arrival.go()
    assert (await predictor.reached(found["id"], "succeeded"))["output"] == [1, 2, 3]


# -- which function


async def test_the_function_must_be_unambiguous(deploy):
    one, other = await deploy(DOUBLES), await deploy(DOUBLES)
    client, body = one.client, {"input": {"n": 1}}
    error = failure(await client.post("/cog/predictions", json=body))
    assert error["status"] == 422
    assert {one.name, other.name} <= set(error["details"]["functions"])
    for given_ in (
        await client.post(f"/cog/predictions?function={one.name}", json=body),
        await client.post("/cog/predictions", json={**body, "version": one.name}),
        await client.post("/cog/predictions", json={**body, "version": "x"}, headers={"X-Pilotflame-Function": one.name}),
    ):  # fmt: skip
        assert given_.json()["version"] == one.name, given_.text
    assert failure(await client.post("/cog/predictions", json={**body, "version": "none"}))["status"] == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400), (b"\xff", 400), (b"[]", 422), (b'{"input": 1, "id": 5}', 422), (b'{"webhook": 7}', 422),
        (b'{"input": 1, "webhook_events_filter": ["never"]}', 422),
        (b'{"input": 1, "webhook": "http://127.0.0.1/"}', 422), (b'{"input":' + b"[" * 400 + b"]" * 400 + b"}", 400),
    ],
)  # fmt: skip
async def test_invalid_bodies_are_refused(deploy, body: bytes, status: int):
    function = await deploy(DOUBLES)
    response = await function.client.post(f"/cog/predictions?function={function.name}", content=body)
    assert failure(response)["status"] == status


async def test_a_body_that_is_too_large_is_refused(deploy):
    predictor = Predictor(await deploy(DOUBLES, {"max_body_bytes": 1000}))
    assert failure(await predictor.post("x" * 1000))["status"] == 413


async def test_the_only_function_needs_no_name_and_a_key_sees_what_it_covers(state):
    async with gateway_here(state, auth="always", drain_s=1.0) as gateway, gateway.at_home() as home:

        async def key(**wanted: Any) -> dict[str, str]:
            made = (await home.post("/v1/keys", json={"name": "k", **wanted})).json()
            return {"Authorization": f"Bearer {made['key']}"}

        gateway.client.headers.update(await key(scopes=["admin"]))
        mine, theirs = (
            await gateway.deploy(DOUBLES, name="mine"),
            await gateway.deploy(DOUBLES, name="theirs"),
        )
        made_ids = []
        for number, covered in enumerate((mine, theirs)):
            headers = await key(functions=[covered.name])
            response = await gateway.client.put(
                f"/cog/predictions/p-{number}", json={"input": {"n": 1}}, headers=headers
            )
            assert response.json()["version"] == covered.name, response.text
            made_ids.append(response.headers["X-Job-Id"])
            assert (await gateway.client.get("/cog/predictions/p-0", headers=headers)).status_code == (404 if number else 200)  # fmt: skip
            assert list((await gateway.client.get("/cog/health-check", headers=headers)).json()["functions"]) == [covered.name]  # fmt: skip
            other = await gateway.client.post("/cog/predictions?function=none", json={}, headers=headers)
            hidden = await gateway.client.post(
                f"/cog/predictions?function={(theirs, mine)[number].name}", json={}, headers=headers
            )
            assert (other.status_code, hidden.status_code) == (404, 404)
        # Callers can guess an id that a caller has chosen, so another key must not see the prediction.
        second = await key(functions=["mine"])
        assert (await gateway.client.get("/cog/predictions/p-0", headers=second)).status_code == 404
        # The job is stored with a longer id, by which an admin finds the prediction.
        whole = made_ids[0]
        assert whole.startswith("p-0~")
        assert (await gateway.client.get(f"/cog/predictions/{whole}")).status_code == 200
        assert (await gateway.client.get(f"/cog/predictions/{whole}", headers=second)).status_code == 404


# -- health


async def test_health(deploy, gate: Gate):
    function = await deploy(WAITS, {"scale.max": 1}, gate=gate)

    async def status() -> str:
        response = await function.client.get("/cog/health-check", params={"function": function.name})
        assert response.status_code == 200
        return str(response.json()["status"])

    assert await status() == "READY"
    call = asyncio.ensure_future(function.call(1))
    arrival = await gate.next("1")
    assert await status() == "BUSY"
    arrival.go()
    await call
    assert await status() == "READY"
    assert (await function.client.get("/cog/health-check")).json()["status"] == "READY"
    assert (await function.client.get("/cog/health-check?function=none")).status_code == 404


async def test_health_of_a_function_that_cannot_start(deploy, gate: Gate):
    source = "import gate\ndef setup():\n    gate.wait('setup')\n    raise ValueError('no')\ndef handler(event):\n    return 1\n"
    function = await deploy(source, gate=gate, check=False)
    call = asyncio.ensure_future(function.call(1))
    arrival = await gate.next("setup")
    response = await function.client.get("/cog/health-check", params={"function": function.name})
    assert response.json()["status"] == "STARTING"
    arrival.go()
    async with asyncio.timeout(LIMIT_S):
        assert (await call).status_code >= 500
    response = await function.client.get("/cog/health-check", params={"function": function.name})
    assert response.json()["status"] == "SETUP_FAILED"


METRICS = """
from cog import BasePredictor, current_scope

class Predictor(BasePredictor):
    def predict(self, fail: bool = False) -> str:
        self.record_metric("token_count", 1, mode="incr")
        current_scope().record_metric("token_count", 2, mode="incr")
        self.record_metric("tags", "fast", mode="append")
        self.scope.metrics["timing.inference"] = 0.5
        self.scope.metrics["gone"] = 1
        del self.scope.metrics["gone"]
        if fail:
            raise ValueError("failed")
        return "ok"
"""


async def test_metrics_that_a_predictor_records(deploy):
    predictor = Predictor(await deploy(None, files={"predict.py": METRICS}))
    recorded = {"token_count": 3, "tags": ["fast"], "timing": {"inference": 0.5}}
    for fail, status in ((False, "succeeded"), (True, "failed")):
        found = (await predictor.post({"fail": fail})).json()
        times = {name: found["metrics"].pop(name) for name in ("predict_time", "total_time")}
        assert (found["status"], found["metrics"]) == (status, recorded)
        again = await predictor.look(found["id"])
        assert again["metrics"] == recorded | times
    # A prediction with a chosen id has the same metrics.
    made = (await predictor.ask("PUT", "/cog/predictions/mine", {"input": {}})).json()
    assert made["metrics"].items() >= recorded.items()
