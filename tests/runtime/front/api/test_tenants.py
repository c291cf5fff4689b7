"""Tenants over real HTTP: no sequence of actions lets a tenant see, change or count the jobs of another tenant."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from example_count import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from live import LIMIT_S, TRUSTED, Gateway, gateway_here, short_folder

TENANTS = 5
FUNCTIONS = {
    "echo": "def handler(event):\n    return event\n",
    "fails": "def handler(event):\n    raise ValueError('no good')\n",
    "stuck": "import asyncio\nasync def handler(event):\n    await asyncio.sleep(3600)\n",
    "pieces": "def handler(event):\n    yield 1\n    yield 2\n",
}
SCOPES = ["invoke", "deploy"]
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMED_OUT"}
# Routes that name a job. For a job of another tenant, they must answer as for a job that does not exist.
OF_A_JOB: list[tuple[str, str]] = [
    ("GET", "/v2/{function}/status/{job}"),
    ("POST", "/v2/{function}/status/{job}"),
    ("GET", "/v2/{function}/stream/{job}"),
    ("GET", "/v2/{function}/stream/{job}?after=0"),
    ("POST", "/v2/{function}/cancel/{job}"),
    ("POST", "/v2/{function}/retry/{job}"),
    ("GET", "/v2/{function}/requests?before={job}"),
    ("GET", "/v1/functions/{function}/jobs/{job}"),
    ("GET", "/v1/functions/{function}/jobs/{job}?wait_s=1"),
    ("GET", "/v1/functions/{function}/jobs/{job}/events"),
    ("POST", "/v1/functions/{function}/jobs/{job}/cancel"),
    ("POST", "/v1/functions/{function}/jobs/{job}/retry"),
    ("GET", "/v1/functions/{function}/jobs?before={job}"),
    ("GET", "/v1/functions/{function}/webhooks?job={job}"),
    ("POST", "/v1/functions/{function}/webhooks/{delivery}/redeliver"),
    ("GET", "/cog/predictions/{job}"),
    ("POST", "/cog/predictions/{job}/cancel"),
    ("GET", "/v2/{function}/status-sync/{job}?wait=1000"),
    ("GET", "/replicate/v1/predictions/{job}"),
    ("POST", "/replicate/v1/predictions/{job}/cancel"),
]


@dataclass(eq=False)
class Tenant:
    """A caller with a key, and the expected state of their jobs."""

    client: httpx.Client
    functions: frozenset[str]
    jobs: dict[str, str] = field(default_factory=dict)
    """The function of each job."""
    cancelled: set[str] = field(default_factory=set)
    purged: bool = False
    retries: dict[str, int] = field(default_factory=dict)
    keys: dict[tuple[str, str], str] = field(default_factory=dict)
    """The job of each function and idempotency key."""
    deliveries: dict[str, str] = field(default_factory=dict)
    """The id of a delivery of each job."""


class Served:
    """A gateway on an event loop in a thread."""

    def __init__(self) -> None:
        self._started: Future[tuple[Gateway, str]] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> Served:
        self._thread.start()
        self.gateway, self.admin_key = self._started.result(LIMIT_S)
        self.admin = self.client(self.admin_key)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def client(self, key: str) -> httpx.Client:
        return httpx.Client(
            base_url=self.gateway.url, headers={"Authorization": f"Bearer {key}"}, timeout=LIMIT_S
        )

    def key(self, **fields: Any) -> str:
        response = self.admin.post("/v1/keys", json={"name": "tenant", **fields})
        assert response.status_code == 201, response.text
        return str(response.json()["key"])

    async def _serve(self) -> None:
        with short_folder() as folder:
            networks = {"webhook_networks": ("127.0.0.0/8",), "drain_s": 1.0}
            async with gateway_here(folder / "state", **networks) as gateway:
                for name, handler in FUNCTIONS.items():
                    await gateway.deploy(handler, {"scale.max": 1, "attempts": 1}, name=name)
                key = await gateway.client.post("/v1/keys", json={"name": "admin", "scopes": ["admin"]})
                self._started.set_result((gateway, key.json()["key"]))
                await self._stop.wait()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as found:
        yield found


def absent(response: httpx.Response, *names: str) -> tuple[int, str]:
    """Return the status and body of a response, without the names that the request has sent and without the request id."""
    text = response.text
    for name in names:
        text = text.replace(name, "…")
    found = json.loads(text)
    if "error" in found and isinstance(found["error"], dict):
        found["error"].pop("request_id", None)
    return response.status_code, json.dumps(found, sort_keys=True)


class TenantMachine(RuleBasedStateMachine):
    """Runs random actions of five tenants, whose keys cover random functions. After each action, every tenant must see exactly their
    own jobs, and no change by another tenant.
    """

    served: Served
    submitted = Bundle("submitted")

    def __init__(self) -> None:
        super().__init__()
        self.tenants: list[Tenant] = []
        self.names = iter(range(10**6))

    @initialize(covered=st.lists(st.sets(st.sampled_from(sorted(FUNCTIONS)), min_size=2), min_size=TENANTS))
    def open(self, covered: list[set[str]]) -> None:
        for names in covered[:TENANTS]:
            key = self.served.key(scopes=SCOPES, policy=TRUSTED, functions=sorted(names))
            self.tenants.append(Tenant(self.served.client(key), frozenset(names)))

    def teardown(self) -> None:
        for tenant in self.tenants:
            for job, function in tenant.jobs.items():
                tenant.client.post(f"/v2/{function}/cancel/{job}")
            tenant.client.close()

    # -- what tenants do with their own jobs

    def submit(self, tenant: Tenant, function: str, job: str, *, key: str = "") -> Any:
        if job in tenant.jobs:
            assert tenant.keys[function, key] == job
            return multiple()
        assert not any(job in other.jobs for other in self.tenants)
        tenant.jobs[job] = function
        if key:
            assert (function, key) not in tenant.keys
            tenant.keys[function, key] = job
        return (tenant, job)

    @rule(
        target=submitted, who=st.integers(0, TENANTS - 1), function=st.sampled_from(sorted(FUNCTIONS)),
        key=st.sampled_from(["", "", "k1", "k2"]), hook=st.sampled_from([True, True, False]), sync=st.booleans(), own=st.booleans(),
    )  # fmt: skip
    def run(self, who: int, function: str, key: str, hook: bool, sync: bool, own: bool) -> Any:
        tenant = self.tenants[who]
        order: dict[str, Any] = {"input": 5}
        if hook:
            # No server listens on this port, so the delivery stays in the outbox.
            order |= {"webhook": "http://127.0.0.1:9/hook", "webhook_events": ["start", "completed"]}
        sync = sync and function not in ("stuck", "pieces")
        path = f"/v2/{function}/{'runsync' if sync else 'run'}"
        if own:
            path = f"/v1/functions/{function}/jobs{'?wait_s=60' if sync else ''}"
        response = tenant.client.post(path, json=order, headers={"Idempotency-Key": key} if key else {})
        if function not in tenant.functions:
            assert response.status_code == 404
            return multiple()
        assert response.status_code in (200, 202), response.text
        return self.submit(tenant, function, response.json()["id"], key=key)

    @rule(
        target=submitted, who=st.integers(0, TENANTS - 1), function=st.sampled_from(["echo", "stuck"]),
        wanted=st.sampled_from(["", "mine", "yours"]),
    )  # fmt: skip
    def predict(self, who: int, function: str, wanted: str) -> Any:
        tenant = self.tenants[who]
        order = {"input": {"n": 5}, "version": function} | ({"id": wanted} if wanted else {})
        response = tenant.client.post("/cog/predictions", json=order, headers={"Prefer": "respond-async"})
        if function not in tenant.functions:
            assert response.status_code == 404
            return multiple()
        # The tenant's prediction of another function already has the wanted id.
        if response.status_code == 409:
            assert any((other, wanted) in tenant.keys for other in tenant.functions - {function})
            return multiple()
        assert response.status_code == 202, response.text
        assert response.json()["id"] == wanted or not wanted
        return self.submit(tenant, function, response.headers["X-Job-Id"], key=wanted)

    @rule(
        target=submitted, who=st.integers(0, TENANTS - 1), function=st.sampled_from(sorted(FUNCTIONS)),
        event=st.sampled_from(["e1", "e2"]),
    )  # fmt: skip
    def send_event(self, who: int, function: str, event: str) -> Any:
        tenant = self.tenants[who]
        headers = {"ce-id": event, "ce-source": "tests", "ce-type": "test", "ce-specversion": "1.0"}
        response = tenant.client.post(f"/v2/{function}/run", json=5, headers=headers)
        if function not in tenant.functions:
            assert response.status_code == 404
            return multiple()
        assert response.status_code == 202, response.text
        return self.submit(tenant, function, response.json()["id"], key=f"event {event}")

    @rule(target=submitted, who=st.integers(0, TENANTS - 1), function=st.sampled_from(sorted(FUNCTIONS)))
    def send_lambda_event(self, who: int, function: str) -> Any:
        tenant = self.tenants[who]
        path, kind = (
            f"/lambda/2015-03-31/functions/{function}/invocations",
            {"X-Amz-Invocation-Type": "Event"},
        )
        before = self.listed(tenant, function)
        response = tenant.client.post(path, json=5, headers=kind)
        if function not in tenant.functions:
            assert response.status_code == 404
            return multiple()
        assert response.status_code == 202, response.text
        (job,) = self.listed(tenant, function) - before
        return self.submit(tenant, function, job)

    @rule(of=submitted)
    def cancel(self, of: tuple[Tenant, str]) -> None:
        tenant, job = of
        response = tenant.client.post(f"/v2/{tenant.jobs[job]}/cancel/{job}")
        assert response.status_code == 200, response.text
        assert response.json()["status"] in FINAL
        tenant.cancelled.add(job)

    @rule(of=submitted)
    def retry(self, of: tuple[Tenant, str]) -> None:
        tenant, job = of
        response = tenant.client.post(f"/v2/{tenant.jobs[job]}/retry/{job}")
        assert response.status_code in (200, 409), response.text
        tenant.retries[job] = tenant.retries.get(job, 0) + (response.status_code == 200)

    @rule(who=st.integers(0, TENANTS - 1), function=st.sampled_from(sorted(FUNCTIONS)), own=st.booleans())
    def purge(self, who: int, function: str, own: bool) -> None:
        tenant = self.tenants[who]
        mine = [job for job, of in tenant.jobs.items() if of == function]
        path, key = (
            (f"/v1/functions/{function}/jobs/purge", "cancelled")
            if own
            else (f"/v2/{function}/purge-queue", "removed")
        )
        response = tenant.client.post(path)
        assert response.status_code == (200 if function in tenant.functions else 404)
        if response.status_code == 200:
            assert response.json()[key] <= len(mine)
            tenant.cancelled.update(mine)

    # -- what tenants try with the jobs of others

    @rule(of=submitted, who=st.integers(1, TENANTS - 1))
    def meddle(self, of: tuple[Tenant, str], who: int) -> None:
        victim, job = of
        # This is always another tenant, because `who` is at least 1.
        stranger = self.tenants[(self.tenants.index(victim) + who) % TENANTS]
        function = victim.jobs[job]
        delivery = victim.deliveries.get(job, "msg_0")
        for name in {job, job.partition("~")[0]}:
            # Skip an id that the stranger has chosen for a job of their own.
            if all(mine.partition("~")[0] != name for mine in stranger.jobs):
                for method, path in OF_A_JOB:
                    told = stranger.client.request(
                        method, path.format(function=function, job=name, delivery=delivery)
                    )
                    same = path.format(function=function, job="job-0", delivery="msg_none")
                    expected = absent(stranger.client.request(method, same), "job-0", "msg_none")
                    assert absent(told, name, delivery) == expected, path

    # -- what must hold after each step

    @invariant()
    def everybody_sees_what_is_theirs_and_nobody_else_changed_it(self) -> None:
        for tenant in self.tenants:
            for function in sorted(tenant.functions):
                mine = {job for job, of in tenant.jobs.items() if of == function}
                found = {job["id"]: job for job in self.all(tenant.client, function)}
                assert found.keys() == mine
                for job, shown in found.items():
                    assert shown["status"] != "CANCELLED" or job in tenant.cancelled, shown
                    assert shown["retries"] == tenant.retries.get(job, 0)
                self.check_counts(tenant, function, mine)
                self.note_deliveries(tenant, function)

    @rule(who=st.integers(0, TENANTS - 1))
    def list_predictions(self, who: int) -> None:
        tenant = self.tenants[who]
        found = tenant.client.get("/replicate/v1/predictions").json()["results"]
        assert {job["id"] for job in found} <= tenant.jobs.keys()

    @rule()
    def an_administrator_sees_all(self) -> None:
        for function in FUNCTIONS:
            found = self.all(self.served.admin, function)
            mine = {job for tenant in self.tenants for job, of in tenant.jobs.items() if of == function}
            assert mine <= {job["id"] for job in found}

    def listed(self, tenant: Tenant, function: str) -> set[str]:
        return {job["id"] for job in self.all(tenant.client, function)}

    def all(self, client: httpx.Client, function: str) -> list[dict[str, Any]]:
        return list(client.get(f"/v2/{function}/requests?limit=1000").json().get("requests", []))

    def check_counts(self, tenant: Tenant, function: str, mine: set[str]) -> None:
        counts = tenant.client.get(f"/v2/{function}/health").json()["jobs"]
        assert counts.pop("retried") == sum(tenant.retries.get(job, 0) for job in mine)
        assert sum(counts.values()) == len(mine)
        assert counts["cancelled"] <= len(mine & tenant.cancelled)
        own = tenant.client.get(f"/v1/functions/{function}/jobs?limit=1000").json()
        assert {job["id"] for job in own["jobs"]} == mine
        assert own["counts"]["cancelled"] == counts["cancelled"]

    def note_deliveries(self, tenant: Tenant, function: str) -> None:
        found = tenant.client.get(f"/v1/functions/{function}/webhooks?limit=1000").json()["deliveries"]
        assert {delivery["job_id"] for delivery in found} <= tenant.jobs.keys()
        tenant.deliveries.update({delivery["job_id"]: delivery["id"] for delivery in found})


def test_nobody_sees_changes_or_counts_what_is_not_theirs(served: Served):
    TenantMachine.served = served
    run_state_machine_as_test(
        TenantMachine,
        settings=settings(
            max_examples=examples(4), stateful_step_count=20, deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
