"""Names the call for which the present thread or task works. A part of a handler that serves several calls at once reads this name."""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple

NORMAL = 3
"""The priority of calls that ask for none. 1 is served first, 5 last."""
PRIORITIES = 5
"""The number of priorities of requests to a language model: 0, which is served first, to PRIORITIES - 1. They order only
requests whose calls have the same priority.
"""


class CallOrigin(NamedTuple):
    """The tenant and the priority of a call."""

    tenant: str = ""
    """A text that differs between the tenants of the gateway and does not identify them; "" for callers without an API key."""
    priority: int = NORMAL

    def rank(self, priority: int) -> int:
        """Return the order of a sequence: by the priority of its call, then by the `priority` of its request. A lower number is served first."""
        return (self.priority - NORMAL) * PRIORITIES + priority


NO_ORIGIN = CallOrigin()
origin: ContextVar[CallOrigin] = ContextVar("origin", default=NO_ORIGIN)
"""The origin of the call that this thread or task works for. In hooks and in batches of several calls, it is NO_ORIGIN."""
