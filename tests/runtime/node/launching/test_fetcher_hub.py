"""Weights on the hub, with a token that one function has: from the deploy to the answer, in a gateway's process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import torch
from hub_server import HubServer
from live import Gateway, failure, gateway_process, short_folder, until
from pilotflame.snapshot.format.manifest import Manifest
from remote_weights import LINEAR
from safetensors.torch import save

pytestmark = pytest.mark.asyncio(loop_scope="module")

HUSH = "hf_hush_of_one_function"


def files(value: float) -> dict[str, bytes]:
    return {"model.safetensors": save({"weight": torch.full((64, 64), value)}), "config.json": b"{}"}


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as found:
        found.add("org/private", files(0.5), readers={HUSH})
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(hub: HubServer) -> AsyncIterator[Gateway]:
    environ = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": "/nowhere"}
    with short_folder() as folder:
        cache_dir = str(folder / "cache")
        async with gateway_process(folder / "state", environ=environ, cache_dir=cache_dir) as found:
            yield found


async def test_a_functions_token_opens_its_weights_and_those_of_no_other(
    gateway: Gateway, hub: HubServer
) -> None:
    for key, value in {"HF_TOKEN": HUSH, "HF_ENDPOINT": hub.endpoint}.items():
        kept = await gateway.client.put(f"/v1/functions/own/secrets/{key}", json={"value": value})
        assert kept.status_code < 300, kept.text
    repository = hub.repositories["org/private"]
    pinned = repository.branches["main"]
    own = await gateway.deploy(LINEAR, {"snapshot": "hf://org/private"}, name="own", check=False)
    # The branch moves before the first fetch: the function keeps the weights that were deployed.
    repository.commit(files(9.0))
    assert (await own.status())["snapshot"] == f"hf://org/private@{pinned}"
    response = await own.call()
    assert response.status_code == 200, response.text
    assert response.json() == [32.0] * 64

    (path,) = gateway.state.glob("functions/own/*/manifest.json")

    async def learned() -> bool:
        return Manifest.read(path).has_digests

    await until(learned, "the manifest has the digests")
    # The weights are in the node's cache now, but a function without the token must not get them.
    error = failure(
        await gateway.send(LINEAR, {"snapshot": f"hf://org/private@{pinned}"}, name="other", check=False)
    )
    assert error["status"] == 422
    assert error["type"] in {"source_missing", "source_denied"}
    assert "HF_TOKEN" in error["message"]
    assert HUSH not in str(error)
    sent = {(asked.server, asked.headers.get("authorization")) for asked in hub.asked}
    assert sent == {("hub", f"Bearer {HUSH}"), ("hub", None), ("cdn", None)}
