"""pilotlight: functions that start when they are called, and cost nothing until then."""

from ._version import __version__
from .errors import PilotlightError
from .handlers.contract import Context, batch

__all__ = ["Context", "PilotlightError", "__version__", "batch"]
