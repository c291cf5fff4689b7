"""Ray Serve with a handler of `make bench-warm`: settings as JSON in the first argument. `POST /`.

All processes that Ray starts belong to this process's session. `ray.shutdown()` ends them. The process that started this
one kills the rest.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import Any

import ray
import work
from ray import serve
from starlette.requests import Request


class Answers:
    """One handler behind `serve.batch`."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._work = work.load(given["handler"], given["model"], given["threads"])
        self._answer.set_max_batch_size(given["batch"])
        self._answer.set_batch_wait_timeout_s(given["wait_ms"] / 1e3)

    async def __call__(self, request: Request) -> Any:
        return await self._answer(await request.json())

    @serve.batch(max_batch_size=1, batch_wait_timeout_s=0.0)  # type: ignore[untyped-decorator]  # both are set above
    async def _answer(self, events: list[Any]) -> list[Any]:
        # In a thread, so that the replica's loop takes requests meanwhile.
        return await asyncio.to_thread(self._work, events)


def main(given: dict[str, Any]) -> None:
    ray.init(
        num_cpus=given["workers"] + 1,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=200 << 20,
        _node_ip_address="127.0.0.1",
        _temp_dir=given["folder"],
        _system_config={"automatic_object_spilling_enabled": False},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": given["port"]}, proxy_location="HeadOnly")
    deployment = serve.deployment(
        Answers,
        num_replicas=given["workers"],
        max_ongoing_requests=1024,
        ray_actor_options={"num_cpus": 0.1},
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    serve.run(deployment.bind(given), route_prefix="/")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    ray.shutdown()  # serve.shutdown() would let HAProxy drain for half a minute first


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main(json.loads(sys.argv[1]))
