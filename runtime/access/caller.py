"""The caller of a request, and what they may do."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import Forbidden, UnknownFunction
from .keys import Scope

EVERYTHING = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class Caller:
    """`owner` is the id of the caller's API key; "" is an anonymous caller, or the gateway's own user."""

    owner: str = ""
    scopes: frozenset[Scope] = EVERYTHING
    functions: frozenset[str] | None = None

    @property
    def urgent(self) -> bool:
        """Whether the caller may choose a high priority: an ordinary key could starve all other tenants."""
        return not self.owner or Scope.ADMIN in self.scopes

    def allows(self, function: str) -> bool:
        """Return True if the caller may know of this function."""
        return self.functions is None or function in self.functions

    def check(self, function: str) -> None:
        """Raise UnknownFunction, as for a missing function, if the caller may not know of this one."""
        if not self.allows(function):
            raise UnknownFunction.named(function)

    def check_scope(self, scope: Scope) -> None:
        """Raise Forbidden."""
        if scope not in self.scopes and Scope.ADMIN not in self.scopes:
            message = f"This API key lacks the scope {scope.value!r}."
            raise Forbidden(message, remedy="Ask the key's creator for one that has it.")

    def check_deploy(self, function: str) -> None:
        """Raise Forbidden, the same whether or not there is such a function."""
        self.check_scope(Scope.DEPLOY)
        if not self.allows(function):
            remedy = "Deploy it under a name that the key covers (--name), or with another key."
            raise Forbidden(f"This API key does not cover a function named {function!r}.", remedy=remedy)


ANYBODY = Caller()
"""The caller of a gateway that requires no key."""
