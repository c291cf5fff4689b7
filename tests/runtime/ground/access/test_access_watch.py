"""Two gateways on one PostgreSQL see each other's changes of keys and secrets."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from pilotflame.errors import GatewayError, UnknownKey
from pilotflame.runtime.ground.access.access_watch import AccessChanges, AccessWatch
from pilotflame.runtime.ground.access.keyring import CLOSED, KEYS, USE_GRAIN_S, Keyring
from pilotflame.runtime.ground.access.keys import NewKey, Scope
from pilotflame.runtime.ground.access.secrets import Secrets
from pilotflame.runtime.ground.storing.postgres import PostgresConnection, migrate
from pilotflame.runtime.ground.storing.postgres_documents import PostgresDocuments
from postgres import postgres_server

NONE = AccessChanges()
GRACE_S = 600.0


@dataclass
class Gateway:
    documents: PostgresDocuments
    keyring: Keyring
    secrets: Secrets
    watch: AccessWatch

    @classmethod
    def start(cls, url: str) -> Gateway:
        documents = PostgresDocuments(url)
        keyring, secrets = Keyring(documents), Secrets(documents)
        keyring.load()
        secrets.load()
        return cls(documents, keyring, secrets, AccessWatch(documents, keyring, secrets, GRACE_S))

    def admits(self, token: str) -> bool:
        return self.keyring.find(token, 1.0) is not None


def migrated(url: str) -> str:
    connection = PostgresConnection(url)
    migrate(connection)
    connection.close()
    return url


@pytest.fixture
def make_gateway(postgres_url: str) -> Iterator[Callable[[], Gateway]]:
    url, made = migrated(postgres_url), list[Gateway]()

    def make() -> Gateway:
        made.append(Gateway.start(url))
        return made[-1]

    yield make
    for one in made:
        one.documents.close()


@pytest.fixture
def gateways(make_gateway: Callable[[], Gateway]) -> tuple[Gateway, Gateway]:
    return make_gateway(), make_gateway()


def test_the_first_key_closes_the_other_gateway(gateways: tuple[Gateway, Gateway]):
    one, other = gateways
    assert other.watch.look() == NONE
    assert not other.keyring.exists
    _, token = one.keyring.create(NewKey(name="a"), 0.0)
    assert not other.admits(token)
    assert other.watch.look() == AccessChanges(revoked=frozenset([""]))
    assert other.keyring.exists
    assert other.admits(token)
    assert other.watch.look() == NONE


def test_a_new_key_is_admitted_and_a_revoked_one_refused(gateways: tuple[Gateway, Gateway]):
    one, other = gateways
    keys = [one.keyring.create(NewKey(name=f"n{number}"), float(number)) for number in range(3)]
    other.watch.look()
    assert [other.admits(token) for _, token in keys] == [True] * 3
    one.keyring.revoke(keys[0][0].id)
    assert other.admits(keys[0][1])
    assert other.watch.look() == AccessChanges(revoked=frozenset([keys[0][0].id]))
    assert [other.admits(token) for _, token in keys] == [False, True, True]
    # A gateway loads the revocation when it changes a key itself. Its next look still reports the revocation.
    one.keyring.revoke(keys[1][0].id)
    other.keyring.create(NewKey(name="new"), 4.0)
    assert not other.admits(keys[1][1])
    assert other.watch.look().revoked == {keys[1][0].id}
    with pytest.raises(UnknownKey):
        other.keyring.revoke(keys[1][0].id)
    assert one.watch.look().revoked == {""}
    assert one.keyring.all() == other.keyring.all()


def test_a_revoked_key_limits_its_functions_at_the_other_gateway(gateways: tuple[Gateway, Gateway]):
    one, other = gateways
    key, _ = one.keyring.create(NewKey(name="a", scopes=(Scope.DEPLOY,), max_workers=3), 0.0)
    other.watch.look()
    one.keyring.revoke(key.id)
    other.watch.look()
    assert (other.keyring.max_workers(key.id), other.keyring.policy(key.id)) == (3, key.policy)


def test_quotas_and_running_requests_go_on(gateways: tuple[Gateway, Gateway]):
    one, other = gateways
    key, token = one.keyring.create(NewKey(name="a", rate_per_s=1.0, burst=2, concurrency=2), 0.0)
    other.watch.look()
    held = other.keyring.find(token, 0.0)
    assert held is not None
    now_s = 1e9
    assert [held.meter.enter(now_s), held.meter.enter(now_s)] == [0.0, 0.0]
    held.meter.leave()
    one.keyring.create(NewKey(name="b"), 1.0)
    one_held = one.keyring.find(token, 0.0)
    assert one_held is not None
    assert one_held.used(5 * USE_GRAIN_S)
    one.keyring.save()
    other.watch.look()
    assert other.keyring.find(token, 0.0) is held
    assert other.keyring.meter(key.id) is held.meter
    assert held.meter.running == 1
    # The bucket is still empty.
    assert held.meter.enter(now_s) > 0
    assert other.keyring.all()[0].last_used_s == 5 * USE_GRAIN_S


def test_secrets_of_the_other_gateway(gateways: tuple[Gateway, Gateway]):
    one, other = gateways
    one.secrets.set("f", "A", "1")
    one.secrets.set("g", "A", "2")
    assert other.watch.look() == AccessChanges(functions=frozenset("fg"))
    assert other.secrets.of("f") == {"A": "1"}
    one.secrets.unset("f", "A")
    one.secrets.set("g", "A", "3")
    other.secrets.set("h", "A", "own")
    # The look does not report the gateway's own change.
    assert other.watch.look() == AccessChanges(functions=frozenset("fg"))
    assert [other.secrets.of(function) for function in "fgh"] == [{}, {"A": "3"}, {"A": "own"}]
    one.secrets.forget("g")
    assert other.watch.look().functions == {"g"}
    one.keyring.create(NewKey(name="a"), 0.0)
    assert other.watch.look().functions == frozenset()
    # A change between the start and the first look is seen.
    assert one.watch.look() == AccessChanges(frozenset([""]), frozenset("h"))


def damage(gateway: Gateway, name: str) -> bytes:
    before = gateway.documents.get(name)
    assert before is not None
    gateway.documents.put(name, b"{")
    return before


def test_damaged_documents_are_warned_of_once_a_change(
    gateways: tuple[Gateway, Gateway], caplog: pytest.LogCaptureFixture
):
    one, other = gateways
    _, token = one.keyring.create(NewKey(name="a"), 0.0)
    one.secrets.set("f", "A", "1")
    other.watch.look()
    caplog.set_level(logging.WARNING)
    keys = damage(one, KEYS)
    one.secrets.set("g", "A", "2")
    # Secrets are loaded although the keys are damaged.
    assert other.watch.look().functions == {"g"}
    for _ in range(3):
        assert other.watch.look() == NONE
    assert other.admits(token)
    assert [record.message for record in caplog.records] == [
        "Keys or secrets that another gateway has changed are not loaded: the document access/keys.json in the database is damaged: "
        "it is no JSON object. Restore it from a backup."
    ]
    caplog.clear()
    one.documents.remove(KEYS)
    damage(one, "access/secrets/g.json")
    for _ in range(3):
        assert other.watch.look() == NONE
    assert ["access/keys.json in the database is missing" in text for text in caplog.messages] == [
        True,
        False,
    ]
    assert "access/secrets/g.json" in caplog.messages[1]
    assert other.admits(token)
    assert other.keyring.exists
    assert other.secrets.of("g") == {"A": "2"}
    caplog.clear()
    one.documents.put(KEYS, keys)
    one.secrets.forget("g")
    assert other.watch.look().functions == {"g"}
    assert caplog.messages == []


def test_a_newer_version_may_write_members_that_this_one_does_not_know(gateways: tuple[Gateway, Gateway]):
    one, other = gateways
    _, token = one.keyring.create(NewKey(name="a"), 0.0)
    file = json.loads(one.documents.get(KEYS) or b"")
    file["keys"][0]["new"], file["newer"] = [1], {"a": 2}
    one.documents.put(KEYS, json.dumps(file).encode())
    other.watch.look()
    assert other.admits(token)
    other.keyring.create(NewKey(name="b"), 1.0)
    rewritten = json.loads(one.documents.get(KEYS) or b"")
    assert (rewritten["keys"][0]["new"], rewritten["newer"]) == ([1], {"a": 2})


def test_keys_are_loaded_while_requests_use_them(gateways: tuple[Gateway, Gateway]):
    """A key that stays is found at each moment, and each key that was revoked has its limits at each moment."""
    one, other = gateways
    _, token = one.keyring.create(NewKey(name="stays", concurrency=100_000), 0.0)
    new = NewKey(name="goes", scopes=(Scope.DEPLOY,), max_workers=3)
    going = [one.keyring.create(new, 1.0)[0].id for _ in range(20)]
    other.watch.look()
    ended, faults, entered = threading.Event(), list[str](), list[int]()

    def call() -> None:
        count = 0
        while not ended.is_set():
            held = other.keyring.find(token, 1.0)
            if held is None or any(other.keyring.policy(key_id) is None for key_id in going):
                faults.append("a key or policy is missing")
            elif held.meter.enter(1.0) == 0.0:
                count += 1
        entered.append(count)

    # Call the meter from one thread only. It has no lock, because in a gateway only the event loop calls it.
    caller = threading.Thread(target=call)
    caller.start()
    for key_id in going:
        one.keyring.revoke(key_id)
        assert other.watch.look().revoked == {key_id}
    ended.set()
    caller.join()
    held = other.keyring.find(token, 1.0)
    assert held is not None
    assert (faults, held.meter.running) == ([], entered[0])


def test_a_server_that_is_gone_ends_no_heartbeat(caplog: pytest.LogCaptureFixture):
    with postgres_server() as server:
        url = migrated(server.url)
        one, other = Gateway.start(url), Gateway.start(url)
        _, token = one.keyring.create(NewKey(name="a"), 0.0)
        other.watch.look()
        for _ in range(2):
            caplog.clear()
            server.kill()
            for _ in range(3):
                assert other.watch.look() == NONE
            assert other.admits(token)
            [message] = caplog.messages
            assert "PostgreSQL could not read" in message
            server.start()
            assert other.watch.look() == NONE
        key, token = one.keyring.create(NewKey(name="b"), 0.0)
        other.watch.look()
        assert other.admits(token)
        assert one.documents.get(CLOSED) == b""
        one.keyring.revoke(key.id)
        assert other.watch.look().revoked == {key.id}
        for gateway in (one, other):
            gateway.documents.close()


def test_keys_count_for_the_grace_after_they_were_read_last(make_gateway: Callable[[], Gateway]) -> None:
    gateway = make_gateway()
    key, token = gateway.keyring.create(NewKey(name="a", scopes=(Scope.READ,)), 0.0)
    read_s = time.time()
    gateway.watch.look()
    for now_s in (read_s, read_s + GRACE_S):
        found = gateway.keyring.find(token, now_s)
        assert found is not None
        assert gateway.keyring.signer(key.id, now_s) is found
    gateway.watch.look()
    late_s = time.time() + GRACE_S
    for find in (gateway.keyring.find, gateway.keyring.signer):
        with pytest.raises(GatewayError, match="cannot reach its database"):
            find(token, late_s)


def test_a_database_that_is_away_does_not_prolong_the_grace() -> None:
    with postgres_server() as server:
        gateway = Gateway.start(migrated(server.url))
        gateway.watch.look()
        until_s = gateway.keyring.current_until_s
        server.kill()
        gateway.watch.look()
        assert gateway.keyring.current_until_s == until_s
        server.start()
        gateway.watch.look()
        assert gateway.keyring.current_until_s > until_s
        gateway.documents.close()
