"""Random requests of five tenants to every route, about functions, jobs and keys of other tenants.

No answer has data of these tenants, and no request changes their state or counters.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import pytest_asyncio
from live import TRUSTED, Gateway, gateway_here, short_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

TENANTS = 5
REQUESTS = 250
SOURCE = "def handler(event):\n    print('MARK')\n    return 'MARK'\n"
ENDLESS_S = 0.3
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD")
# Values that a caller can guess without knowing anything of another tenant.
GUESSES = ("1", "x", "true", "0", "-1", "2020-01-01", "echo", "%2e%2e", "*")


@dataclass
class Tenant:
    """A tenant with its own key and function, and the names and ids that belong to them."""

    name: str
    mark: str
    key: dict[str, Any]
    known: list[str] = field(default_factory=list)
    """Names and ids of this tenant: functions, jobs, keys, deliveries."""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key['key']}"}


@dataclass
class House:
    """A gateway with all tenants."""

    gateway: Gateway
    admin: httpx.AsyncClient
    tenants: list[Tenant]
    routes: list[tuple[str, str, list[str]]]
    """Method, path and names of parameters of each operation."""

    async def state_of(self, tenant: Tenant) -> dict[str, Any]:
        """Return the state of a tenant's function, secrets, jobs and key, which no other tenant may change."""
        name = f"{tenant.name}-f"
        status = (await self.admin.get(f"/v1/functions/{name}")).json()
        jobs = (await self.admin.get(f"/v2/{name}/requests")).json()
        return {
            "status": {
                key: status[key] for key in ("name", "revision", "stopped", "invocations", "activations")
            },
            "secrets": (await self.admin.get(f"/v1/functions/{name}/secrets")).json(),
            "jobs": [(job["id"], job["status"]) for job in jobs["requests"]],
            "revisions": (await self.admin.get(f"/v1/functions/{name}/revisions")).json(),
            "key": [
                one for one in (await self.admin.get("/v1/keys")).json()["keys"] if one["name"] == tenant.name
            ],
        }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house() -> Any:
    with short_folder() as folder:
        async with gateway_here(folder / "state", auth="always") as gateway, gateway.at_home() as admin:
            tenants = [await tenant_of(gateway, admin, number) for number in range(TENANTS)]
            document = (await admin.get("/openapi.json")).json()
            yield House(gateway, admin, tenants, list(operations(document)))


async def tenant_of(gateway: Gateway, admin: httpx.AsyncClient, number: int) -> Tenant:
    name, mark = f"tenant{number}", f"mark-{number}-{random.Random(number).randrange(1 << 60):x}"
    body = {"name": name, "scopes": ["invoke", "deploy"], "functions": [f"{name}-f"], "policy": TRUSTED}
    made = await admin.post("/v1/keys", json=body)
    assert made.status_code == 201, made.text
    tenant = Tenant(name, mark, made.json())
    function = f"{name}-f"
    gateway.client.headers.update(tenant.headers)
    await gateway.deploy(SOURCE.replace("MARK", mark), name=function)
    secret = await admin.put(f"/v1/functions/{function}/secrets/TOKEN", json={"value": mark})
    assert secret.status_code < 300, secret.text
    run = await admin.post(f"/v2/{function}/runsync?wait=20000", json={"input": mark}, headers=tenant.headers)
    assert run.json()["output"] == mark
    tenant.known = [function, run.json()["id"], tenant.key["id"], name]
    return tenant


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method.upper() in METHODS:
                given = [one["name"] for one in operation.get("parameters", ()) if one.get("in") == "query"]
                yield method.upper(), path, given


def filled(path: str, victim: Tenant, chance: random.Random) -> str:
    """Return the path with names and ids of the victim."""
    while "{" in path:
        before, _, rest = path.partition("{")
        name, _, after = rest.partition("}")
        of_function = name in {"function", "name"}
        value = victim.known[0] if of_function else chance.choice([*victim.known, *GUESSES])
        path = before + value + after
    return path


async def answer_of(client: httpx.AsyncClient, request: httpx.Request) -> tuple[int, str]:
    """Return the status, and the text that arrives in time: some answers are endless."""
    text, status = b"", 0
    try:
        async with asyncio.timeout(ENDLESS_S if request.method == "GET" else 20.0):
            response = await client.send(request, stream=True)
            status = response.status_code
            text = str(response.headers).encode()
            async for part in response.aiter_bytes():
                text += part
            await response.aclose()
    except TimeoutError:
        pass
    return status, text.decode(errors="replace")


@pytest.mark.parametrize("seed", range(12))
async def test_requests_about_others_tell_change_and_count_nothing(house: House, seed: int) -> None:
    chance = random.Random(seed)
    # No attacker is a victim, because a request without the name of a function may call the attacker's own function.
    shuffled = chance.sample(house.tenants, TENANTS)
    attackers, victims = shuffled[:2], shuffled[2:]
    before = {tenant.name: await house.state_of(tenant) for tenant in victims}
    chosen = chance.sample(house.routes, min(REQUESTS, len(house.routes)))
    async with httpx.AsyncClient(base_url=house.gateway.url, timeout=30.0) as client:
        for method, path, names in chosen:
            attacker, victim = chance.choice(attackers), chance.choice(victims)
            query = {
                name: chance.choice([*victim.known, *GUESSES])
                for name in names
                if name not in {"follow", "wait", "wait_s"} and chance.random() < 0.5
            }
            body = chance.choice([None, {}, {"input": 1}, {"value": "x"}, {"name": victim.known[0]}])
            request = client.build_request(
                method, filled(path, victim, chance), params=query, headers=attacker.headers,
                json=body if method in {"POST", "PUT", "PATCH"} else None,
            )  # fmt: skip
            status, text = await answer_of(client, request)
            where = f"{request.method} {request.url} as {attacker.name}: {status} {text[:500]}"
            assert status < 500, where
            assert victim.mark not in text, where
            assert victim.known[1] not in text or victim.known[1] in str(request.url), where
            assert victim.key["key"] not in text, where
    for tenant in victims:
        assert await house.state_of(tenant) == before[tenant.name]


async def test_a_tenant_sees_its_own(house: House) -> None:
    """If a tenant did not see its own data, the test above would prove nothing."""
    tenant = house.tenants[0]
    async with httpx.AsyncClient(base_url=house.gateway.url, headers=tenant.headers) as client:
        found = await client.get(f"/v2/{tenant.known[0]}/status/{tenant.known[1]}")
        assert tenant.mark in found.text
        assert tenant.mark in (await client.get(f"/v1/functions/{tenant.known[0]}/logs")).text
