"""The model `repeat_int32` of Triton's examples: a response for each value of IN, after as many milliseconds as DELAY says.

WAIT has no effect: it is how long Triton's model waits before it takes another request.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

import numpy
import pilotflame
from pydantic import BaseModel


class Inputs(BaseModel):
    IN: Annotated[numpy.ndarray, pilotflame.Tensor("INT32", [-1])]
    DELAY: Annotated[numpy.ndarray, pilotflame.Tensor("UINT32", [-1])]
    WAIT: Annotated[numpy.ndarray, pilotflame.Tensor("UINT32", [1])]


class Outputs(BaseModel):
    OUT: Annotated[numpy.ndarray, pilotflame.Tensor("INT32", [1])]


async def handler(event: Inputs) -> AsyncIterator[Outputs]:
    for value, delay_ms in zip(event.IN, event.DELAY, strict=True):
        await asyncio.sleep(delay_ms / 1000)
        yield Outputs(OUT=numpy.array([value]))
