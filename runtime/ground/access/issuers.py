"""Verifies tokens of OpenID Connect issuers: JSON Web Tokens (RFC 7519) that act as an API key of this gateway.

The issuer's document (OpenID Connect Discovery 1.0) names the address of its public keys (RFC 7517). Both are fetched when
the first token of the issuer arrives, and again if they are old, or if a token names a key that is not among the fetched keys.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
from joserfc import jws, jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import JWKRegistry, KeySet
from joserfc.jws import JWSRegistry

from ....errors import GatewayError, Unauthorized
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
MOST_HEADER_BYTES, MOST_OWNER_CHARS, LATEST_S = 8192, 200, 1e11
_MALFORMED = (JoseError, ValueError, TypeError, KeyError, RecursionError, OverflowError)
_UNFETCHED = (*_MALFORMED, httpx.HTTPError, httpx.InvalidURL, OSError)
_REGISTRY = JWSRegistry(algorithms=ALGORITHMS, strict_check_header=False)
_REGISTRY.max_header_length = MOST_HEADER_BYTES


class Federated(NamedTuple):
    """The API key whose rights a token has, the owner that the token names, and when the token expires."""

    held: Held
    owner: str
    """ "" if the key has no `owner_claim`."""
    expires_s: float


@dataclass
class _Keys:
    """The public keys of one issuer."""

    keys: KeySet | None = None
    fetched_s: float = -FRESH_S
    """The monotonic time of the last fetch, even if it failed."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.fetched_s


class Issuers:
    """The public keys of all issuers that API keys name."""

    def __init__(self, keys_of: Callable[[str, float], Sequence[Held]]) -> None:
        """`keys_of` returns the valid API keys with this issuer's URL at this time."""
        self._keys_of = keys_of
        self._fetched: dict[str, _Keys] = {}

    async def find(self, token: str, now_s: float) -> Federated:
        """Return the API key whose rights a token has. Raise Unauthorized if the token is not valid, or fits no key. Raise GatewayError if the
        issuer's keys cannot be fetched.
        """
        claims = _unverified(token)
        issuer = claims.get("iss")
        held = self._keys_of(issuer, now_s) if isinstance(issuer, str) else ()
        if not isinstance(issuer, str) or not held:
            raise _refused("no API key names its issuer")
        # Fetch keys only after this check, so only from issuers that API keys name.
        found = await self._verified(issuer, token)
        _check_times(found, now_s)
        for one in held:
            if (owner := _owner(one, found)) is not None:
                return Federated(one, owner, float(found["exp"]))
        raise _refused("no API key of its issuer has its audience and subject")

    async def _verified(self, issuer: str, token: str) -> dict[str, Any]:
        try:
            return _decoded(token, await self._keys(issuer))
        except InvalidKeyIdError:
            # The issuer may have a new key.
            keys = await self._keys(issuer, new=True)
        try:
            return _decoded(token, keys)
        except InvalidKeyIdError:
            raise _refused("its issuer has no such key") from None

    async def _keys(self, issuer: str, *, new: bool = False) -> KeySet:
        """Return the keys of an issuer. If they are old, or with `new`, fetch them again, but not within LEAST_PAUSE_S of the last fetch.

        During a fetch, other callers without `new` get the old keys. If the fetch fails, all get the old keys. Raise GatewayError if
        there are none.
        """
        known = self._fetched.setdefault(issuer, _Keys())
        if known.keys is not None and not new and (known.age_s < FRESH_S or known.lock.locked()):
            return known.keys
        async with known.lock:
            # Another caller may have fetched them meanwhile.
            if known.age_s > LEAST_PAUSE_S:
                try:
                    known.keys = await _fetch(issuer)
                except _UNFETCHED as error:
                    if known.keys is None:
                        raise _unreachable(issuer, error) from None
                finally:
                    known.fetched_s = time.monotonic()
            if known.keys is None:
                raise _unreachable(issuer, None)
            return known.keys


def _decoded(token: str, keys: KeySet) -> dict[str, Any]:
    """Return the claims of a token. Raise InvalidKeyIdError if `keys` lacks the token's key, Unauthorized if the signature is not valid."""
    try:
        return dict(jwt.decode(token, keys, registry=_REGISTRY).claims)
    except InvalidKeyIdError:
        raise
    except _MALFORMED as error:
        raise _refused(f"its signature is not valid ({type(error).__name__})") from None


async def _fetch(issuer: str) -> KeySet:
    async with httpx.AsyncClient(timeout=FETCH_TIMEOUT_S) as client:
        document = await _json(client, issuer.rstrip("/") + DISCOVERY)
        if document["issuer"] != issuer:
            raise ValueError(f"it calls itself {document['issuer']!r}")
        address = str(document["jwks_uri"])
        if not address.startswith("https://") and not issuer.startswith("http://"):
            raise ValueError(f"its keys are not at an https:// address: {address[:200]!r}")
        found = [_key(one) for one in (await _json(client, address))["keys"]]
        return KeySet([key for key in found if key is not None])


def _key(data: Any) -> Any:
    """Return a public key, or None if its kind is not known or it is not for signatures."""
    try:
        if data.get("use", "sig") != "sig":
            return None
        return JWKRegistry.import_key(
            {name: data[name] for name in data if name not in {"use", "key_ops", "alg"}}
        )
    except (*_MALFORMED, AttributeError):
        return None


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
    except _MALFORMED:
        claims = None
    if not isinstance(claims, dict):
        raise _refused("it is malformed")
    return claims


def _check_times(claims: dict[str, Any], now_s: float) -> None:
    """Raise Unauthorized unless the token has a time of expiry and is valid now."""
    try:
        jwt.JWTClaimsRegistry(now=int(now_s), leeway=LEEWAY_S, exp={"essential": True}).validate(claims)
        if not float(claims["exp"]) < LATEST_S:
            raise ValueError(claims["exp"])
    except _MALFORMED:
        raise _refused("it has expired, is not valid yet, or has no claim `exp`") from None


def _owner(held: Held, claims: dict[str, Any]) -> str | None:
    """Return the owner that the claims name for an API key; None if the claims do not fit the key."""
    rule = held.key.issuer
    audiences, subject = claims.get("aud"), claims.get("sub")
    audiences = audiences if isinstance(audiences, list) else [audiences]
    if rule is None or rule.audience not in audiences or not isinstance(subject, str):
        return None
    if not _fits(rule.subject, subject):
        return None
    if rule.owner_claim is None:
        return ""
    owner = claims.get(rule.owner_claim)
    valid = isinstance(owner, str) and 0 < len(owner) <= MOST_OWNER_CHARS and owner.isprintable()
    return owner if valid else None


def _fits(pattern: str, text: str) -> bool:
    """Return True if `text` fits a pattern in which * stands for any characters."""
    first, *middle = pattern.split("*")
    if not middle:
        return text == pattern
    *middle, last = middle
    if not text.startswith(first) or not text.endswith(last) or len(text) < len(first) + len(last):
        return False
    at, end = len(first), len(text) - len(last)
    for part in middle:
        # Take the earliest match, which leaves the most text for the other parts.
        if (found := text.find(part, at, end)) < 0:
            return False
        at = found + len(part)
    return True


def _refused(why: str) -> Unauthorized:
    remedy = "Get a new token, or see `pilotflame keys list` on the gateway's machine."
    return Unauthorized(f"The token is refused: {why}.", remedy=remedy)


def _unreachable(issuer: str, error: Exception | None) -> GatewayError:
    reason = f": {type(error).__name__}: {error}" if error is not None else ""
    return GatewayError(
        f"The keys of the issuer {issuer} cannot be fetched{reason}.",
        remedy="Check the issuer's URL of the API key, and the network of the gateway.",
    )
