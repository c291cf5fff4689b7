"""Fails on a text that comes as a tensor, and its error quotes it."""

from typing import Annotated

import numpy
import pilotflame
from pydantic import BaseModel


class Texts(BaseModel):
    x: Annotated[numpy.ndarray, pilotflame.Tensor("BYTES", [-1])]


def handler(event: Texts) -> Texts:
    raise ValueError(str(event.x)[:100])
