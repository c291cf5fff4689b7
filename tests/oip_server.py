"""A gateway with the models of Triton's examples, and with models for each datatype and error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from live import Gateway, free_port, gateway_here, home_client, short_folder

# A handler with an optional input and an output of each datatype: arrays of numpy named `n_...`, tensors of
# torch named `t_...`.
EVERY = """
import numpy
import pilotflame
import torch
from typing import Annotated, Optional
from pydantic import create_model
from pilotflame.handlers.tensors import DATATYPES

def fields():
    for name in DATATYPES:
        for key, kind in (("n_", numpy.ndarray), ("t_", torch.Tensor)):
            if (key, name) != ("t_", "BYTES"):
                shape = [-1, -1] if key == "n_" else [-1]
                yield key + name.lower(), (Optional[Annotated[kind, pilotflame.Tensor(name, shape)]], None)

Tensors = create_model("Tensors", **dict(fields()))

def handler(event: Tensors, context) -> Tensors:
    if context.extra:
        context.log.info("extra: %s", dict(context.extra))
    return event
"""
PLAIN = "def handler(event):\n    return event\n"
MODELS = Path(__file__).parent / "triton_models"
IDENTITY = (MODELS / "simple_identity/handler.py").read_text()
BROKEN = IDENTITY.replace('return {"OUTPUT0": event["INPUT0"]}', 'raise ValueError("of the handler")')
WRONG = IDENTITY.replace('event["INPUT0"]}', "numpy.zeros((2, 2))}")
STREAMS = IDENTITY.replace("-> Outputs", "-> Iterator[Outputs]").replace("return {", "yield {")

PASSING = """
from typing import Annotated
import numpy
import pilotflame
from pydantic import BaseModel

class X(BaseModel):
    x: Annotated[numpy.ndarray, pilotflame.Tensor("FP32", [-1])]

def handler(event: X) -> X:
    return event
"""


@dataclass(frozen=True)
class Server:
    """A gateway, and the addresses of its protocol."""

    gateway: Gateway
    http: str
    grpc: str


@asynccontextmanager
async def oip_server() -> AsyncIterator[Server]:
    """Run a gateway with the models, which also serves gRPC."""
    with short_folder() as folder:
        port = free_port()
        async with gateway_here(
            folder / "state", plugin_ports=(f"oip=127.0.0.1:{port}",), rest_mb=8192
        ) as gateway:
            found = {
                path.name.replace("_", "-"): (path / "handler.py").read_text() for path in MODELS.iterdir()
            }
            others = {
                "every": EVERY, "plain": PLAIN, "broken": BROKEN, "wrong": WRONG,
                "streams": "from collections.abc import Iterator\n" + STREAMS,
            }  # fmt: skip
            for name, source in (found | others).items():
                await gateway.deploy(source, name=name)
            await gateway.deploy(found["simple"], {"env.DATATYPE": "INT8"}, name="simple-int8")
            host, http_port = gateway.address
            yield Server(gateway, f"{host}:{http_port}", f"127.0.0.1:{port}")


async def key(gateway: Gateway, **fields: Any) -> str:
    """Create an API key for calls, and return it."""
    async with home_client(gateway.state) as home:
        made = await home.post("/v1/keys", json={"name": "caller", "scopes": ["invoke"], **fields})
    return str(made.json()["key"])
