"""The models `simple` and, with DATATYPE=INT8, `simple_int8` of Triton's examples: the sum and the difference of two rows."""

import os
from typing import Annotated

import numpy
import pilotflame
from pydantic import BaseModel

Row = Annotated[numpy.ndarray, pilotflame.Tensor(os.environ.get("DATATYPE", "INT32"), [-1, 16])]


class Inputs(BaseModel):
    INPUT0: Row
    INPUT1: Row


class Outputs(BaseModel):
    OUTPUT0: Row
    OUTPUT1: Row


@pilotflame.batch(max_size=8)
def handler(events: list[Inputs]) -> list[Outputs]:
    return [Outputs(OUTPUT0=one.INPUT0 + one.INPUT1, OUTPUT1=one.INPUT0 - one.INPUT1) for one in events]
