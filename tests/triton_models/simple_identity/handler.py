"""The model `simple_identity` of Triton's examples: its output is its input."""

from typing import Annotated

import numpy
import pilotflame
from typing_extensions import TypedDict

Text = Annotated[numpy.ndarray, pilotflame.Tensor("BYTES", [-1, -1])]


class Inputs(TypedDict):
    INPUT0: Text


class Outputs(TypedDict):
    OUTPUT0: Text


def handler(event: Inputs) -> Outputs:
    return {"OUTPUT0": event["INPUT0"]}
