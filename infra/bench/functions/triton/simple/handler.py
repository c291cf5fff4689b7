"""The model `simple` of Triton's examples: the sum and the difference of two rows."""

from typing import Annotated

import numpy
import pilotflame
from pydantic import BaseModel

Row = Annotated[numpy.ndarray, pilotflame.Tensor("INT32", [-1, 16])]


class Inputs(BaseModel):
    INPUT0: Row
    INPUT1: Row


class Outputs(BaseModel):
    OUTPUT0: Row
    OUTPUT1: Row


@pilotflame.batch(max_size=8)
def handler(events: list[Inputs]) -> list[Outputs]:
    return [Outputs(OUTPUT0=one.INPUT0 + one.INPUT1, OUTPUT1=one.INPUT0 - one.INPUT1) for one in events]
