"""What the description says of access: every route that is guarded says so, and every route there is is described or known not to be."""

from __future__ import annotations

from typing import Any

import pytest
from live import Gateway
from pilotflame.runtime.api.rules import OPEN

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def described(gateway: Gateway) -> dict[str, Any]:
    return dict((await gateway.client.get("/openapi.json")).json())


async def test_every_route_but_health_says_what_it_answers_without_a_key(gateway: Gateway):
    paths = (await described(gateway))["paths"]
    for path, operations in paths.items():
        for operation in operations.values():
            assert ("401" in operation["responses"]) is (path not in OPEN), path
            assert ("security" in operation) is (path not in OPEN), path


async def test_what_is_described_is_what_is_answered(gateway: Gateway):
    found = await described(gateway)
    listed = (await gateway.client.get("/v1/keys")).json()
    assert set(listed) == set(found["paths"]["/v1/keys"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]["properties"])  # fmt: skip
    async with gateway.at_home() as owner:
        made = (await owner.post("/v1/keys", json={"name": "described"})).json()
    assert set(made) == {*found["components"]["schemas"]["ApiKey"]["properties"], "key"}
