"""Weights in a registry, with a login that one function has: from the deploy to the answer, in a gateway's process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import torch
from live import Gateway, failure, gateway_process, short_folder
from registry_server import CONFIG_TYPE, PASSWORD, WEIGHT_TYPE, Registry, auth_file, digest, registry
from remote_weights import LINEAR
from safetensors.torch import save

pytestmark = pytest.mark.asyncio(loop_scope="module")


def push(into: Registry, reference: str, value: float) -> tuple[str, bytes]:
    """Push a model. Return the digest of its manifest, and its weights."""
    weights = save({"weight": torch.full((64, 64), value)})
    layers = [
        into.layer("org/net", weights, f"{WEIGHT_TYPE}.raw", "model.safetensors"),
        into.layer("org/net", b"{}", f"{CONFIG_TYPE}.raw", "config.json"),
    ]
    return into.push(reference, layers), weights


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry(tmp_path_factory.mktemp("registry"), "token") as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(found: Registry) -> AsyncIterator[Gateway]:
    environ = {"DOCKER_CONFIG": "/nowhere", "XDG_CONFIG_HOME": "/nowhere"}
    with short_folder() as folder:
        cache_dir = str(folder / "cache")
        async with gateway_process(folder / "state", environ=environ, cache_dir=cache_dir) as running:
            yield running


async def test_a_functions_login_opens_its_weights_and_those_of_no_other(
    gateway: Gateway, found: Registry
) -> None:
    pinned, _ = push(found, "org/net:v1", 0.5)
    url = f"oci://{found.host}/org/net:v1"
    await _keep_login(gateway, found, "own")
    own = await gateway.deploy(LINEAR, {"snapshot": url}, name="own", check=False)
    # The tag moves before the first fetch: the function keeps the weights that were deployed.
    push(found, "org/net:v1", 9.0)
    assert (await own.status())["snapshot"] == f"{url}@{pinned}"
    response = await own.call()
    assert response.status_code == 200, response.text
    assert response.json() == [32.0] * 64

    error = failure(await gateway.send(LINEAR, {"snapshot": f"{url}@{pinned}"}, name="other", check=False))
    assert (error["status"], error["type"]) == (422, "source_denied")
    assert PASSWORD not in str(error)


async def test_a_damaged_layer_fails_the_activation_and_is_named(gateway: Gateway, found: Registry) -> None:
    _, weights = push(found, "org/net:bad", 0.25)
    found.damage(weights, len(weights) - 3)
    await _keep_login(gateway, found, "bad")
    url = f"oci://{found.host}/org/net:bad"
    bad = await gateway.deploy(LINEAR, {"snapshot": url}, name="bad", check=False)
    error = failure(await bad.call())
    assert error["status"] >= 500
    assert digest(weights) in error["message"]


async def _keep_login(gateway: Gateway, found: Registry, name: str) -> None:
    value = {"value": auth_file(found.host)}
    kept = await gateway.client.put(f"/v1/functions/{name}/secrets/DOCKER_AUTH_CONFIG", json=value)
    assert kept.status_code < 300, kept.text
