"""The limit of the bytes of inputs and results: which owners are refused, and a gateway with this limit for each way to run a job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live import Gateway, gateway_here, until
from pilotflame.runtime.ground.access.keys import ALL
from pilotflame.runtime.jobs.stored.stored_bytes import StoredBytes

MOST = 1_000_000
LARGE = "def handler(event):\n    return 'x' * event\n"


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(1, 400_000)), st.integers(0, 100_000))
def test_nobody_exceeds_the_limit_and_a_new_owner_finds_room(held: Mapping[str, int], size: int) -> None:
    stored = StoredBytes(MOST)
    for owner, own in held.items():
        stored.add({owner: own, ALL: own})
    if stored.of_all + size > MOST:
        assert stored.refusal("a", size) is not None
        assert stored.refusal("", size) is not None
    # If only one owner has bytes, it is refused only above nine tenths of the limit.
    elif stored.refusal("a", size) is not None and set(held) == {"a"}:
        assert held["a"] + size >= 0.9 * MOST - 1
    elif stored.of_all < MOST // 2:
        assert stored.refusal("new", 1) is None


def test_what_was_added_and_removed_leaves_nothing() -> None:
    stored = StoredBytes(MOST)
    stored.add({ALL: 5, "a": 5})
    stored.add({ALL: -5, "a": -5})
    assert stored.of_all == 0
    assert not stored._of


@pytest.fixture
async def small(state: Path):
    async with gateway_here(state, max_stored_bytes=MOST, keep_result_s=0.5) as gateway:
        yield gateway


async def accepted(gateway: Gateway, path: str, event: int) -> int:
    response = await gateway.client.post(path, json={"input": event})
    if response.status_code == 429:
        assert "max_stored_bytes" in response.text
    return response.status_code


@pytest.mark.parametrize("way", ["run", "runsync?wait=10000"])
async def test_results_that_fill_the_limit_stop_new_jobs_until_they_expire(small: Gateway, way: str) -> None:
    function = await small.deploy(LARGE)
    path = f"/v2/{function.name}/{way}"
    assert await accepted(small, path, MOST) == 200

    async def full() -> bool:
        return await accepted(small, path, 1) == 429

    async def free() -> bool:
        return await accepted(small, path, 1) == 200

    await until(full, "the limit is reached")
    await until(free, "the result has expired")


async def test_the_bytes_are_counted_over_a_restart(state: Path) -> None:
    async with gateway_here(state, max_stored_bytes=MOST) as gateway:
        function = await gateway.deploy(LARGE)
        path = f"/v2/{function.name}/runsync?wait=10000"
        assert await accepted(gateway, path, MOST) == 200
    async with gateway_here(state, max_stored_bytes=MOST) as gateway:
        assert await accepted(gateway, path, 1) == 429


async def test_a_log_with_a_nul_character_is_counted_in_full(small: Gateway) -> None:
    function = await small.deploy("def handler(event):\n    print('\\0' + 'é' * 1000)\n    return event\n")
    assert await accepted(small, f"/v2/{function.name}/runsync?wait=10000", 1) == 200
    assert small.server is not None
    stored = small.server.jobs.store
    assert (await stored.stored_bytes())[ALL] > 2000

    async def nothing() -> bool:
        return not any((await stored.stored_bytes()).values())

    await until(nothing, "the job has expired")
