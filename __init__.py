"""pilotflame: serverless inference. Functions start when they are called, and cost nothing until then."""

from ._version import __version__
from .errors import PilotflameError
from .handlers.contract import Context, batch

__all__ = ["Context", "PilotflameError", "__version__", "batch"]
