"""Tokens of an OpenID Connect issuer act as an API key: which are refused, what they may do, and how keys are fetched."""

from __future__ import annotations

import asyncio
import base64
import hmac
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from joserfc.jwk import ECKey, KeySet, RSAKey
from live import TRUSTED, Gateway, gateway_here
from oidc_issuer import AUDIENCE, Issuer
from pilotflame.runtime.ground.access import issuers

ECHO = "def handler(event):\n    return event\n"


def segment(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode()


def by_hand(algorithm: str, body: str, secret: bytes) -> str:
    """Return a token that a library would not make: signed with a public key as the secret, for example."""
    head = base64.urlsafe_b64encode(f'{{"alg":"{algorithm}","kid":"one"}}'.encode()).rstrip(b"=").decode()
    made = hmac.digest(secret, f"{head}.{body}".encode(), "sha256")
    return f"{head}.{body}.{base64.urlsafe_b64encode(made).rstrip(b'=').decode()}"


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    async with Issuer() as found:
        yield found


@pytest.fixture
async def gateway(state: Path) -> AsyncIterator[Gateway]:
    async with gateway_here(state, auth="always") as found, found.at_home() as home:
        order = {"name": "first", "scopes": ["admin"]}
        found.client.headers["Authorization"] = (
            f"Bearer {(await home.post('/v1/keys', json=order)).json()['key']}"
        )
        await found.deploy(ECHO, name="echo")
        await found.deploy(ECHO, name="other")
        yield found


async def key_of(
    gateway: Gateway, issuer: Issuer, rule: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    more = {"url": issuer.url, "audience": AUDIENCE, "subject": "repo:me/*"} | (rule or {})
    body = {"name": "federated", "functions": ["echo"], "issuer": more} | fields
    made = await gateway.client.post("/v1/keys", json=body)
    assert made.status_code == 201, made.text
    return dict(made.json())


async def call(gateway: Gateway, token: str, function: str = "echo") -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return await gateway.client.post(f"/invoke/{function}", json=5, headers=headers)


async def test_a_token_acts_as_the_key(gateway: Gateway, issuer: Issuer) -> None:
    key = await key_of(gateway, issuer)
    assert key["key"] == ""
    assert (await call(gateway, issuer.token())).json() == 5
    assert (await call(gateway, issuer.token(aud=["x", AUDIENCE], sub="repo:me/[x]\n"))).status_code == 200
    # For the caller, a function that the key may not use does not exist.
    assert (await call(gateway, issuer.token(), "other")).status_code == 404
    headers = {"Authorization": f"Bearer {issuer.token()}"}
    assert (await gateway.client.get("/v1/functions", headers=headers)).status_code == 403
    assert issuer.asked == 1
    await gateway.client.delete(f"/v1/keys/{key['id']}")
    assert (await call(gateway, issuer.token())).status_code == 401


OTHER_CLAIMS: list[dict[str, Any]] = [
    {"aud": "another"}, {"aud": None}, {"sub": "repo:you/app:main"}, {"sub": None}, {"exp": 1}, {"exp": None},
    {"nbf": 4_000_000_000}, {"exp": 10**400}, {"iss": "https://issuer.example"}, {"iss": None}, {"exp": "soon"}, {"sub": 7},
]  # fmt: skip


async def test_a_token_with_other_claims_is_refused(gateway: Gateway, issuer: Issuer) -> None:
    await key_of(gateway, issuer)
    for claims in OTHER_CLAIMS:
        answer = await call(gateway, issuer.token(**claims))
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "unauthorized"), claims
    # With the right claims, the gateway accepts a token. So it refused the tokens above because of their claims.
    assert (await call(gateway, issuer.token())).status_code == 200


async def test_a_token_that_the_issuer_has_not_signed_is_refused(gateway: Gateway, issuer: Issuer) -> None:
    await key_of(gateway, issuer)
    assert (await call(gateway, issuer.token())).status_code == 200
    forged = RSAKey.generate_key(2048, {"kid": "one"})
    public = issuer.keys.keys[0].as_pem(private=False)
    head, body, _ = issuer.token().split(".")
    for token in (
        issuer.token(forged), issuer.token(ECKey.generate_key("P-256", {"kid": "two"})), by_hand("HS256", body, public),
        by_hand("none", body, b""), segment('["alg"]') + f".{body}.AAAA", segment('{"alg":"RS256","crit":5}') + f".{body}.AAAA",
        f"{head}.{segment('[' * 5000)}.AAAA", f"{head}.{body}.AAAA", "a.b.c", f"{'x' * 3000}.{'y' * 3000}.z",
    ):  # fmt: skip
        assert (await call(gateway, token)).status_code == 401, token
    # Tokens with unknown keys cause no new fetch soon after the last fetch.
    assert issuer.asked == 1


async def test_new_keys_of_the_issuer_are_fetched(
    gateway: Gateway, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuers, "LEAST_PAUSE_S", 0.0)
    await key_of(gateway, issuer)
    assert (await call(gateway, issuer.token())).status_code == 200
    issuer.keys = KeySet([ECKey.generate_key("P-256", {"kid": "two", "use": "sig"})])
    assert (await call(gateway, issuer.token())).status_code == 200
    # Keys that are known are used while the issuer does not answer.
    issuer.down = True
    monkeypatch.setattr(issuers, "FRESH_S", 0.0)
    assert (await call(gateway, issuer.token())).status_code == 200


async def test_keys_of_other_kinds_and_header_fields_that_are_not_known_do_no_harm(
    gateway: Gateway, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await key_of(gateway, issuer)
    own = issuer.keys.as_dict(private=False)["keys"]
    others = [
        {"kty": "new", "kid": "a"},
        {"kty": "EC", "crv": "P-1", "kid": "b"},
        7,
        own[0] | {"use": "enc", "kid": "c"},
    ]
    monkeypatch.setattr(issuer, "published", [*others, *own])
    assert (await call(gateway, issuer.token(header={"x-more": "1"}))).status_code == 200


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        ("a*b", "ab", True), ("a*b", "axxb", True), ("a*b", "abx", False), ("*", "", True), ("a", "ab", False),
        ("a*a", "a", False), ("*x*y", "1x2y", True), ("*x*y", "1y2x", False), ("[a]*", "[a]b", True), ("*-*-*:x", "-" * 200, False),
    ],
)  # fmt: skip
def test_a_star_stands_for_any_characters(pattern: str, text: str, fits: bool) -> None:
    assert issuers._fits(pattern, text) is fits


@pytest.mark.parametrize("broken", ["down", "named"])
async def test_an_issuer_without_keys_is_named_in_the_error(
    gateway: Gateway, issuer: Issuer, broken: str
) -> None:
    setattr(issuer, broken, broken == "down" or "https://another.example")
    await key_of(gateway, issuer)
    answer = await call(gateway, issuer.token())
    assert answer.status_code >= 500
    assert issuer.url in answer.json()["error"]["message"]


async def test_owners_see_their_own_jobs_only(gateway: Gateway, issuer: Issuer) -> None:
    await key_of(gateway, issuer, {"owner_claim": "email"})
    for email in (None, "", 5, "x" * 201, "a\nb", "\0"):
        assert (await call(gateway, issuer.token(email=email))).status_code == 401
    ann, bob = ({"Authorization": f"Bearer {issuer.token(email=name)}"} for name in ("ann", "bob"))
    job = (await gateway.client.post("/v2/echo/runsync", json={"input": 1}, headers=ann)).json()["id"]
    assert (await gateway.client.get(f"/v2/echo/status/{job}", headers=ann)).json()["status"] == "COMPLETED"
    assert (await gateway.client.get(f"/v2/echo/status/{job}", headers=bob)).status_code == 404


async def test_the_quota_of_the_key_holds_for_its_tokens(gateway: Gateway, issuer: Issuer) -> None:
    await key_of(gateway, issuer, rate_per_s=0.001, burst=1)
    assert (await call(gateway, issuer.token())).status_code == 200
    assert (await call(gateway, issuer.token(sub="repo:me/other"))).status_code == 429


async def test_a_followed_answer_ends_with_the_token(gateway: Gateway, issuer: Issuer) -> None:
    await key_of(gateway, issuer, scopes=["deploy"], policy=TRUSTED)
    headers = {"Authorization": f"Bearer {issuer.token(exp=int(time.time()) + 1)}"}
    async with (
        asyncio.timeout(20),
        gateway.client.stream("GET", "/v1/functions/echo/logs?follow=1", headers=headers) as followed,
    ):
        assert followed.status_code == 200
        async for _ in followed.aiter_bytes():
            pass


async def test_a_key_that_cannot_work_is_refused(gateway: Gateway) -> None:
    fields: list[dict[str, Any]] = [
        {"issuer": {"url": "http://issuer.example", "audience": "a", "subject": "*"}},
        {"issuer": {"url": "https://issuer.example"}},
        {"issuer": {"url": "https://issuer.example", "audience": "a"}, "aws": True},
        {
            "issuer": {"url": "https://issuer.example", "audience": "a", "owner_claim": "x"},
            "scopes": ["deploy"],
        },
    ]
    for one in fields:
        answer = await gateway.client.post("/v1/keys", json={"name": "k", **one})
        assert answer.status_code in {400, 422}, (one, answer.text)
