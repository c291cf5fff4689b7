"""The caller: what the one who sent a request may do."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import Forbidden, UnknownFunction
from .keys import Scope

EVERYTHING = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class Caller:
    """`owner` is the id of the caller's API key; "" is nobody in particular, or the gateway's own user."""

    owner: str = ""
    scopes: frozenset[Scope] = EVERYTHING
    functions: frozenset[str] | None = None

    @property
    def urgent(self) -> bool:
        """Whether it may go before others: a key that anybody may have would starve all other tenants."""
        return not self.owner or Scope.ADMIN in self.scopes

    def allows(self, function: str) -> bool:
        """Whether the caller may know of this function."""
        return self.functions is None or function in self.functions

    def check(self, function: str) -> None:
        """Raises what a function that does not exist gives, for one that this caller is not to know of."""
        if not self.allows(function):
            raise UnknownFunction.named(function)

    def check_scope(self, scope: Scope) -> None:
        """Raises Forbidden."""
        if scope not in self.scopes and Scope.ADMIN not in self.scopes:
            raise Forbidden(
                f"This API key's scopes do not cover that: it takes {scope.value!r}.",
                remedy="Ask whoever made the key for one that does.",
            )

    def check_deploy(self, function: str) -> None:
        """Raises Forbidden, the same whether or not there is such a function."""
        self.check_scope(Scope.DEPLOY)
        if not self.allows(function):
            raise Forbidden(
                f"This API key does not cover a function named {function!r}.",
                remedy="Deploy under a name that it covers (--name), or with another key.",
            )


ANYBODY = Caller()
"""Whoever comes to a gateway that asks nobody who he is."""
