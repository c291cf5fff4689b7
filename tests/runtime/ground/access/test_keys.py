"""The stored key does not contain the token, tokens are compared in constant time, and malformed tokens are refused."""

from __future__ import annotations

import inspect
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import BadInput, Forbidden, UnknownFunction
from pilotflame.runtime.ground.access.keyring import Keyring
from pilotflame.runtime.ground.access.keys import (
    ANYBODY,
    TOKEN,
    ApiKey,
    Caller,
    NewKey,
    Scope,
    check_engine,
    check_first,
    mint,
    parse_new_key,
)

ISSUER = b'{"url": "https://issuer.example", "audience": "here", "subject": "repo:me/*"}'
OWNING = ISSUER[:-1] + b', "owner_claim": "sub"}'


def test_a_token_opens_its_key_and_no_other():
    key, token = mint(NewKey(name="a"), 0.0)
    other, another = mint(NewKey(name="b"), 0.0)
    assert key.opens(token, 1.0)
    assert not key.opens(another, 1.0)
    assert not key.opens(token[:-1] + ("0" if token[-1] != "0" else "1"), 1.0)
    match = TOKEN.fullmatch(token)
    assert match is not None
    assert match[1] == key.id != other.id


def test_what_is_stored_and_shown_does_not_hold_the_token():
    key, token = mint(NewKey(name="a"), 0.0)
    random = token.rpartition("_")[2]
    assert len(bytes.fromhex(random)) == 32
    assert random not in key.model_dump_json()
    assert key.digest not in json.dumps(key.shown())


def test_only_a_key_for_aws_has_a_digest_that_could_sign() -> None:
    assert mint(NewKey(name="a"), 0.0)[0].signing_digest is None
    key, _ = mint(NewKey(name="a", aws=True), 0.0)
    assert key.signing_digest is not None
    assert key.shown()["aws"] is True
    assert key.signing_digest not in json.dumps(key.shown())


def test_an_expired_key_opens_nothing():
    key, token = mint(NewKey(name="a", expires_in_s=10), 100.0)
    assert key.opens(token, 109.9)
    assert not key.opens(token, 110.0)


def test_comparing_takes_constant_time():
    assert "hmac.compare_digest(" in inspect.getsource(ApiKey.opens)
    assert "NOBODY" in inspect.getsource(Keyring.find)
    assert "==" not in inspect.getsource(ApiKey.opens)


@given(st.text())
def test_other_text_is_no_token(text: str):
    assert TOKEN.fullmatch(text) is None
    assert TOKEN.fullmatch(f"pf_{text}") is None


def test_a_request_is_parsed():
    new = parse_new_key(
        b'{"name": "shop", "scopes": ["invoke", "deploy"], "functions": ["a"], "rate_per_s": 2}'
    )
    assert new.scopes == (Scope.INVOKE, Scope.DEPLOY)
    assert new.functions == ("a",)
    assert parse_new_key(b'{"name": "x"}').scopes == (Scope.INVOKE,)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "body"),
        (b"[]", "body"),
        (b"{}", "name"),
        (b'{"name": ""}', "name"),
        (b'{"name": "a\\nb"}', "name"),
        (b'{"name": "a", "scopes": []}', "scopes"),
        (b'{"name": "a", "scopes": ["root"]}', "scopes"),
        (b'{"name": "a", "scope": ["invoke"]}', "scope"),
        (b'{"name": "a", "functions": ["Not A Name"]}', "functions"),
        (b'{"name": "a", "scopes": ["admin"], "functions": ["a"]}', "covers all"),
        (b'{"name": "a", "rate_per_s": 0}', "rate_per_s"),
        (b'{"name": "a", "rate_per_s": "fast"}', "rate_per_s"),
        (b'{"name": "a", "burst": 3}', "rate_per_s"),
        (b'{"name": "a", "concurrency": 0}', "concurrency"),
        (b'{"name": "a", "expires_in_s": -1}', "expires_in_s"),
        (b'{"name": "a", "expires_in_s": 3155760001}', "expires_in_s"),
        (b'{"name": "a", "rate_per_s": 1, "burst": 0}', "burst"),
        (b'{"name": "a", "model_tokens_per_min": 0}', "model_tokens_per_min"),
        (b'{"name": "a", "max_workers": 1}', "max_workers needs the scope deploy"),
        (b'{"name": "a", "policy": {}}', "policy needs the scope deploy"),
        (b'{"name": "a", "scopes": ["deploy", "admin"], "policy": {}}', "may deploy everything"),
        (b'{"name": "a", "aws": true, "issuer": %s}' % ISSUER, "no secret that could sign"),
        (
            b'{"name": "a", "scopes": ["deploy"], "issuer": %s}' % OWNING,
            "owner_claim is for keys that only call",
        ),
        (b'{"name": "a", "issuer": %s}' % ISSUER.replace(b"https", b"http"), "use an https:// address"),
    ],
)
def test_an_invalid_request_is_refused_by_field(body: bytes, named: str):
    with pytest.raises(BadInput, match=named):
        parse_new_key(body)


# -- what a caller may


@pytest.mark.parametrize(
    ("scopes", "allowed"),
    [
        ({Scope.INVOKE}, {Scope.INVOKE}),
        ({Scope.READ}, {Scope.READ}),
        ({Scope.DEPLOY}, {Scope.DEPLOY, Scope.READ}),
        ({Scope.ADMIN}, set(Scope)),
    ],
)
def test_a_scope_allows_what_it_includes(scopes: set[Scope], allowed: set[Scope]) -> None:
    caller = Caller("k1", frozenset(scopes))
    assert {scope for scope in Scope if caller.has(scope)} == allowed
    assert caller.urgent is caller.administers is (Scope.ADMIN in scopes)
    for scope in set(Scope) - allowed:
        with pytest.raises(Forbidden, match=f"lacks the scope '{scope.value}'"):
            caller.check_scope(scope)
    # Without a key, a caller lacks a scope only where a function is served alone.
    with pytest.raises(Forbidden, match="serves one function alone"):
        Caller("", frozenset({Scope.INVOKE})).check_scope(Scope.ADMIN)
    assert ANYBODY.urgent


def test_a_key_for_some_functions_tells_nothing_of_others() -> None:
    caller, all_ = Caller("k1", frozenset({Scope.DEPLOY}), frozenset({"a"})), Caller("k2")
    assert [one.allows(name) for one in (caller, all_) for name in "ab"] == [True, False, True, True]
    caller.check("a")
    caller.check_deploy("a")
    with pytest.raises(UnknownFunction):
        caller.check("b")
    with pytest.raises(Forbidden, match="does not cover a function named 'b'"):
        caller.check_deploy("b")


def test_a_key_that_deploys_is_for_containers_unless_it_says_more() -> None:
    asked = b'{"name": "a", "scopes": ["deploy"]%s}'
    new, trusted = parse_new_key(asked % b""), parse_new_key(asked % b', "policy": {"kind": "trusted"}')
    assert [mint(one, 0.0)[0].container_only for one in (new, trusted)] == [True, False]
    assert not mint(NewKey(name="a", scopes=(Scope.ADMIN,)), 0.0)[0].container_only
    for one, engine in ((new, "podman"), (trusted, None), (NewKey(name="a"), None)):
        check_engine(one, engine)
    with pytest.raises(BadInput, match="no container engine"):
        check_engine(new, None)


def test_the_first_key_is_one_that_can_make_others() -> None:
    check_first(["invoke", "admin"])
    with pytest.raises(BadInput, match="must have the scope admin"):
        check_first(["invoke", "deploy"])


def test_a_key_of_an_issuer_has_no_token() -> None:
    key, token = mint(parse_new_key(b'{"name": "a", "issuer": %s}' % ISSUER), 0.0)
    assert (token, key.shown()["issuer"]["audience"]) == ("", "here")
