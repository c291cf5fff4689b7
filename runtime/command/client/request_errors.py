"""Makes the errors of requests to a gateway, for any HTTP library."""

from __future__ import annotations

import json
from typing import Any

from ....errors import GatewayError, GatewayUnreachable, PilotflameError
from ....snapshot.sources.location import shown
from .address import CA_VARIABLE


def unreachable(url: str, error: Exception) -> GatewayUnreachable:
    """Return the error for a request that could not be sent, because there is no connection."""
    remedy = "Start one with `pilotflame serve`; if it is still starting, try again. Name another with --url or PILOTFLAME_URL."
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        remedy = f"Let {CA_VARIABLE} name the PEM file of the authority that signed its certificate."
    return GatewayUnreachable(f"No gateway answers at {url}: {error}.", remedy=remedy)


def broken(url: str, error: Exception) -> GatewayError:
    """Return the error for a connection that broke after the request was sent."""
    broke = f"The connection to the gateway at {url} broke: {str(error).rstrip('.')}."
    return GatewayError(broke, remedy="Check that it still runs, and call again.")


def answered(url: str, status: int, body: bytes, target: str = "") -> PilotflameError:
    """Return the error in the response to a request for `url`. `target` is the Location header of the response."""
    if 300 <= status < 400 and target:
        moved = f"{url} answered {status}, which names another address: {shown(target)[:200]!r}."
        return GatewayError(moved, remedy="Let --url (or PILOTFLAME_URL) name the gateway itself.")
    try:
        return PilotflameError.from_wire(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return _not_a_gateway(url, status, body)


def json_object(url: str, status: int, body: bytes) -> dict[str, Any]:
    """Return the JSON object in the body of a response. Raise GatewayError if there is none."""
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _not_a_gateway(url, status, body)
    return found


def check_gateway(url: str, status: int, body: bytes) -> None:
    """Raise GatewayError unless `body`, the response to a request for /, names a gateway."""
    if json_object(url, status, body).get("name") != "pilotflame":
        raise _not_a_gateway(url, status, body)


def _not_a_gateway(url: str, status: int, body: bytes) -> GatewayError:
    text = " ".join(body[:2000].decode(errors="replace").split())[:200]
    wrong = f"{url} answered {status}, and not as a gateway does: {text!r}."
    remedy = "Name a pilotflame gateway with --url (or PILOTFLAME_URL); `pilotflame serve --port 8601` starts one at that port."
    return GatewayError(wrong, remedy=remedy)
