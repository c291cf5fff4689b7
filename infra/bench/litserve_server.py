"""LitServe with the same trivial work as our hello handler, logs off; every setting is an argument."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import litserve


class HelloAPI(litserve.LitAPI):  # type: ignore[misc]
    """`{"name": "x"}` in, `{"message": "Hello, x!"}` out."""

    def setup(self, device: str) -> None:
        del device

    def decode_request(self, request):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
        # LitServe gives an annotation here a meaning (FastAPI's); without one it hands over the decoded JSON.
        return str(request["name"])

    def predict(self, name: str) -> str:
        return f"Hello, {name}!"

    def encode_response(self, output: str) -> dict[str, str]:
        return {"message": output}


class HelloAsyncAPI(litserve.LitAPI):  # type: ignore[misc]
    """The same, in LitServe's asynchronous loop."""

    def setup(self, device: str) -> None:
        del device

    async def decode_request(self, request):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
        return str(request["name"])

    async def predict(self, name: str) -> str:
        return f"Hello, {name}!"

    async def encode_response(self, output: str) -> dict[str, str]:
        return {"message": output}


class HelloBatchAPI(HelloAPI):
    """The same, a batch at a time."""

    def batch(self, inputs: list[str]) -> list[str]:
        return inputs

    def predict(self, names: list[str]) -> list[str]:  # type: ignore[override]
        return [f"Hello, {name}!" for name in names]

    def unbatch(self, output: list[str]) -> list[str]:
        return output


def _api(settings: dict[str, Any]) -> litserve.LitAPI:
    if settings["enable_async"]:
        return HelloAsyncAPI(enable_async=True)
    batch = settings["max_batch_size"]
    if batch > 1:
        return HelloBatchAPI(max_batch_size=batch, batch_timeout=settings["batch_timeout_s"])
    return HelloAPI()


def main(settings: dict[str, Any]) -> None:
    logging.disable(logging.WARNING)
    api = _api(settings)
    server = litserve.LitServer(
        api,
        accelerator="cpu",
        workers_per_device=settings["workers_per_device"],
        fast_queue=settings["fast_queue"],
        timeout=False,
        disable_openapi_url=True,
    )
    server.run(
        host="127.0.0.1",
        port=settings["port"],
        num_api_servers=settings["num_api_servers"],
        log_level="error",
        generate_client_file=False,
        access_log=False,
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
