"""The model `simple_string` of Triton's examples: the sum and the difference of two rows of numbers as text."""

from typing import Annotated

import numpy
import pilotflame
from pydantic import BaseModel

Row = Annotated[numpy.ndarray, pilotflame.Tensor("BYTES", [-1, 16])]


class Inputs(BaseModel):
    INPUT0: Row
    INPUT1: Row


class Outputs(BaseModel):
    OUTPUT0: Row
    OUTPUT1: Row


def handler(event: Inputs) -> Outputs:
    left, right = event.INPUT0.astype(int), event.INPUT1.astype(int)
    return Outputs(OUTPUT0=(left + right).astype(str), OUTPUT1=(left - right).astype(str))
