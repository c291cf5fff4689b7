"""What imports leave in a zygote, with real zygotes and workers: no worker gets bytes, numbers or files of another."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from leaving_handlers import APART, FILES, INGREDIENTS, ask, at_home, check, echo_server, handler_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

TWO_WORKERS = {"scale.min": 2, "scale.max": 2}
# Without torch, whose import takes seconds.
QUICK = [name for name in INGREDIENTS if "torch" not in name and name != "global"]
FORKED = [name for name in QUICK if INGREDIENTS[name].forks]


async def compare(gateway, names: list[str], folder: Path, calls: int) -> None:
    """Deploy a handler with these ingredients, call its two workers, and compare their answers."""
    with echo_server() as port:
        function = await gateway.deploy(
            handler_of(names), {**TWO_WORKERS, "env.PORT": str(port), "timeout_s": 60.0}, files=FILES
        )
        await function.settled(ready=2)
        answers = await ask(function, calls)
        check(names, answers, at_home(names, folder, port, calls))
        warnings = " ".join(function.described["warnings"])
        assert ("spawned, not forked" in warnings) is not all(INGREDIENTS[name].forks for name in names)
        await gateway.client.delete(f"/v1/functions/{function.name}")


@pytest.mark.parametrize("names", [FORKED, QUICK], ids=["forked", "spawned"])
async def test_workers_share_nothing_that_their_import_left(gateway, names: list[str], tmp_path: Path):
    await compare(gateway, names, tmp_path, calls=60)


def mixtures() -> st.SearchStrategy[list[str]]:
    some = st.lists(st.sampled_from(sorted(INGREDIENTS)), min_size=1, max_size=8, unique=True)
    return some.filter(lambda names: not any(pair <= set(names) for pair in APART))


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=20, suppress_health_check=list(HealthCheck), phases=[Phase.generate], derandomize=True)
@given(names=mixtures())
async def test_random_mixtures_of_what_an_import_leaves(gateway, tmp_path_factory, names: list[str]):
    """500 calls in all."""
    await compare(gateway, names, tmp_path_factory.mktemp("home"), calls=25)
