"""Verifies tokens of OpenID Connect issuers: JSON Web Tokens (RFC 7519) that act as an API key of this gateway.

The issuer's document (OpenID Connect Discovery 1.0) names the address of its public keys (RFC 7517). Both are fetched when
a token of the issuer first comes, and again if they are old, or if a token names a key that they do not have.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
from joserfc import jws, jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from ...errors import GatewayError, Unauthorized
from .keyring import Held

ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
DISCOVERY = "/.well-known/openid-configuration"
LEEWAY_S = 60
"""The most that the clocks of an issuer and of the gateway may differ."""
FRESH_S = 3600.0
"""Keys that are older are fetched again."""
LEAST_PAUSE_S = 10.0
"""The shortest time between two fetches from one issuer, so that tokens with invented keys cause few fetches."""
FETCH_TIMEOUT_S = 5.0
MOST_BYTES = 1 << 20


class Federated(NamedTuple):
    """The API key as which a token acts, the owner that the token names, and when the token expires."""

    held: Held
    owner: str
    """ "" if the key names no claim of owners."""
    expires_s: float


@dataclass
class _Keys:
    """The public keys of one issuer."""

    keys: KeySet | None = None
    fetched_s: float = -FRESH_S
    """When they were fetched, or could not be fetched, by the monotonic clock."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Issuers:
    """The public keys of all issuers that API keys name."""

    def __init__(self, keys_of: Callable[[str, float], Sequence[Held]]) -> None:
        """`keys_of` returns the valid API keys with this issuer's URL at this time."""
        self._keys_of = keys_of
        self._fetched: dict[str, _Keys] = {}

    async def find(self, token: str, now_s: float) -> Federated:
        """Return the API key as which a token acts. Raise Unauthorized if the token is not valid, or fits no key."""
        claims = _unverified(token)
        issuer = claims.get("iss")
        held = self._keys_of(issuer, now_s) if isinstance(issuer, str) else ()
        if not isinstance(issuer, str) or not held:
            raise _refused("no API key names its issuer")
        # Keys are fetched only now, so only from issuers that API keys name.
        found = await self._verified(issuer, token)
        _check_times(found, now_s)
        for one in held:
            if (owner := _owner(one, found)) is not None:
                return Federated(one, owner, float(found["exp"]))
        raise _refused("no API key of its issuer has its audience and subject")

    async def _verified(self, issuer: str, token: str) -> dict[str, Any]:
        for least_s in (0.0, time.monotonic()):
            keys = await self._keys(issuer, least_s)
            try:
                return dict(jwt.decode(token, keys, algorithms=ALGORITHMS).claims)
            except (JoseError, ValueError) as error:
                reason = error
        raise _refused(f"its signature is not valid ({type(reason).__name__})")

    async def _keys(self, issuer: str, least_s: float) -> KeySet:
        """Return the keys of an issuer. Fetch them again if they are older than `least_s`, but not too often."""
        known = self._fetched.setdefault(issuer, _Keys())
        async with known.lock:
            age_s = time.monotonic() - known.fetched_s
            wanted = known.keys is None or age_s > FRESH_S or known.fetched_s < least_s
            if wanted and age_s > LEAST_PAUSE_S:
                known.fetched_s = time.monotonic()
                try:
                    known.keys = await _fetch(issuer)
                except (httpx.HTTPError, JoseError, ValueError, KeyError, TypeError) as error:
                    if known.keys is None:
                        raise _unreachable(issuer, error) from None
            if known.keys is None:
                raise _unreachable(issuer, None)
            return known.keys


async def _fetch(issuer: str) -> KeySet:
    async with httpx.AsyncClient(timeout=FETCH_TIMEOUT_S) as client:
        document = await _json(client, issuer.rstrip("/") + DISCOVERY)
        if document["issuer"] != issuer:
            raise ValueError(f"it calls itself {document['issuer']!r}")
        address = str(document["jwks_uri"])
        if not address.startswith("https://") and not issuer.startswith("http://"):
            raise ValueError(f"its keys are not at an https:// address: {address[:200]!r}")
        return KeySet.import_key_set(await _json(client, address))


async def _json(client: httpx.AsyncClient, url: str) -> Any:
    async with asyncio.timeout(FETCH_TIMEOUT_S), client.stream("GET", url) as response:
        response.raise_for_status()
        content = b""
        async for part in response.aiter_bytes():
            content += part
            if len(content) > MOST_BYTES:
                raise ValueError(f"{url} has more than {MOST_BYTES} bytes")
    return httpx.Response(200, content=content).json()


def _unverified(token: str) -> dict[str, Any]:
    """Return the claims of a token whose signature is not checked yet."""
    try:
        claims = httpx.Response(200, content=jws.extract_compact(token.encode()).payload).json()
    except (JoseError, ValueError):
        claims = None
    if not isinstance(claims, dict):
        raise _refused("it is malformed")
    return claims


def _check_times(claims: dict[str, Any], now_s: float) -> None:
    """Raise Unauthorized unless the token has an end and is valid now."""
    try:
        jwt.JWTClaimsRegistry(now=int(now_s), leeway=LEEWAY_S, exp={"essential": True}).validate(claims)
    except JoseError:
        raise _refused("it has expired, is not valid yet, or has no claim `exp`") from None


def _owner(held: Held, claims: dict[str, Any]) -> str | None:
    """Return the owner that the claims name for an API key; None if the claims do not fit the key."""
    rule = held.key.issuer
    audiences, subject = claims.get("aud"), claims.get("sub")
    audiences = audiences if isinstance(audiences, list) else [audiences]
    if rule is None or rule.audience not in audiences or not isinstance(subject, str):
        return None
    if not re.fullmatch(".*".join(map(re.escape, rule.subject.split("*"))), subject, re.DOTALL):
        return None
    if rule.owner_claim is None:
        return ""
    owner = claims.get(rule.owner_claim)
    return owner if isinstance(owner, str) and owner else None


def _refused(why: str) -> Unauthorized:
    remedy = "Get a new token, or see `pilotflame keys list` on the gateway's machine."
    return Unauthorized(f"The token is refused: {why}.", remedy=remedy)


def _unreachable(issuer: str, error: Exception | None) -> GatewayError:
    reason = f": {type(error).__name__}: {error}" if error is not None else ""
    return GatewayError(
        f"The keys of the issuer {issuer} cannot be fetched{reason}.",
        remedy="Check the issuer's URL of the API key, and the network of the gateway.",
    )
