"""Defines what a source may use besides a function's own secrets, and to which addresses it may connect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ...addresses import Addresses
from ...errors import SourceDenied

NETWORKS_VARIABLE = "PILOTFLAME_SNAPSHOT_NETWORKS"
IDENTITY_VARIABLE = "PILOTFLAME_SNAPSHOT_IDENTITY"
"""The gateway's settings that messages name."""


@dataclass(frozen=True, slots=True)
class Access:
    """The credentials that one source may use, and the addresses to which it may connect."""

    own_only: bool = False
    """True if the source uses only the function's own secrets, and no credentials and settings of this process."""
    addresses: Addresses | None = None
    """The addresses to which the source may connect; None if it may connect to all, also through a proxy."""
    until_s: float = math.inf
    """The monotonic time at which all reading ends, also from a server that sends byte by byte. `to_wire` leaves it out."""

    def to_wire(self) -> dict[str, Any]:
        """Return this object as JSON for `from_wire`, without `until_s`."""
        networks = None if self.addresses is None else [str(network) for network in self.addresses.allowed]
        return {"own_only": self.own_only, "networks": networks}

    @classmethod
    def from_wire(cls, sent: Mapping[str, Any]) -> Self:
        networks = sent["networks"]
        return cls(sent["own_only"], None if networks is None else Addresses.of(networks))


ANY = Access()
"""The access of trusted functions and of the gateway's user, without limits."""


def refused(where: str, reason: str) -> SourceDenied:
    """Return the error for a source whose address is not in `Access.addresses`."""
    # The address is not shown, because that would reveal how names resolve in our network.
    return SourceDenied(
        f"{where}: its address may not be connected to: {reason}.",
        remedy=f"Use a public address, or ask the gateway's owner to list its network in {NETWORKS_VARIABLE}.",
    )


def unchecked(scheme: str) -> SourceDenied:
    """Return the error for a source whose addresses cannot be limited."""
    return SourceDenied(
        f"{scheme}:// may not be used by this function: connections of this cloud's client cannot be checked.",
        remedy=f"Use another source, or ask the gateway's owner to list the URL in {IDENTITY_VARIABLE}, and set no secrets"
        " of this cloud.",
    )
