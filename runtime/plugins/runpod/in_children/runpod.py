"""Provides the stand-in for `runpod` to processes that a handler starts.
These processes may run the handler's file again, so `start` does nothing.
"""

import sys
from collections.abc import Mapping
from typing import Any

from pilotflame.runtime.plugins.runpod.sdk import stand_in


def start(_config: Mapping[str, Any]) -> None:
    """Do nothing: only the worker takes jobs."""


def progress_update(_job: Mapping[str, Any], _progress: Any) -> None:
    sys.stderr.write(
        "progress_update: call it in the worker's process. Its child processes cannot report progress.\n"
    )


sys.modules.update(stand_in(start, progress_update))
