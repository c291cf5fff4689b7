"""The stored key does not contain the token, tokens are compared in constant time, and malformed tokens are refused."""

from __future__ import annotations

import inspect
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import BadInput
from pilotflame.runtime.ground.access.keyring import Keyring
from pilotflame.runtime.ground.access.keys import TOKEN, ApiKey, NewKey, Scope, mint, parse_new_key


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
    ],
)
def test_an_invalid_request_is_refused_by_field(body: bytes, named: str):
    with pytest.raises(BadInput, match=named):
        parse_new_key(body)
