"""LitServe with the work of one of our handlers. Its options are JSON in the first argument. `POST /predict`."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import litserve
import work

OPTIONS = {
    "model": "",
    "workers": 1,
    "threads": 1,
    "batch": 1,
    "wait_ms": 0.0,
    "fast_queue": False,
    "api_servers": 1,
}


class OneByOne(litserve.LitAPI):  # type: ignore[misc]
    """Takes one event, and returns one answer."""

    def __init__(self, given: dict[str, Any], **settings: Any) -> None:
        super().__init__(**settings)
        self._given = given
        self._work: Any = None

    def setup(self, device: str) -> None:
        del device
        given = self._given
        self._work = work.load(given["handler"], given["model"], given["threads"])

    def decode_request(self, request):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
        # LitServe gives an annotation here a meaning (FastAPI's). Without one it passes the decoded JSON.
        return request

    def predict(self, event: Any) -> Any:
        return self._work([event])[0]

    def encode_response(self, output: Any) -> Any:
        return output


class Batched(OneByOne):
    """Takes a batch of events."""

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, events: list[Any]) -> list[Any]:
        found: list[Any] = self._work(events)
        return found

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output


def main(given: dict[str, Any]) -> None:
    logging.disable(logging.WARNING)
    kind = Batched if given["batch"] > 1 else OneByOne
    server = litserve.LitServer(
        kind(given, max_batch_size=given["batch"], batch_timeout=given["wait_ms"] / 1e3),
        accelerator="cpu",
        workers_per_device=given["workers"],
        fast_queue=given["fast_queue"],
        timeout=False,
        disable_openapi_url=True,
    )
    server.run(
        host="127.0.0.1",
        port=given["port"],
        num_api_servers=given["api_servers"],
        log_level="error",
        generate_client_file=False,
        access_log=False,
    )


if __name__ == "__main__":
    main({**OPTIONS, **json.loads(sys.argv[1])})
