"""Names the caller of the present thread or task, for parts of a handler that callers share, such as the rows of a language model."""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple

NORMAL = 3
"""The priority of calls that ask for none. 1 is served first, 5 last."""
PRIORITIES = 5
"""A request of a language model has a priority among calls of one priority: 0, which is served first, to PRIORITIES - 1."""


class CallOrigin(NamedTuple):
    """The tenant and the priority of a call."""

    tenant: str = ""
    """Differs between tenants of the gateway, and tells nothing of them; "" for callers without an API key."""
    priority: int = NORMAL

    def rank(self, priority: int) -> int:
        """Return the order of a sequence whose request has this priority among calls of one priority. A lower number is served first."""
        return (self.priority - NORMAL) * PRIORITIES + priority


NO_ORIGIN = CallOrigin()
origin: ContextVar[CallOrigin] = ContextVar("origin", default=NO_ORIGIN)
"""The origin of the call that this thread or task works for. In hooks and in batches of several calls, it is NO_ORIGIN."""
