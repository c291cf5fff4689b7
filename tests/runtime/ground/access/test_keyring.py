"""Keys outlive the process, revoked keys are gone, and no damaged file opens the gateway."""

from __future__ import annotations

import copy
import json
import math
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import GatewayError, UnknownKey
from pilotflame.runtime.ground.access.deploy_policy import DeployPolicies
from pilotflame.runtime.ground.access.keyring import ACCESS, KEYS, MOST_CALL_MIN, USE_GRAIN_S, Keyring, Meter
from pilotflame.runtime.ground.access.keys import NewKey, Scope, TokenIssuer
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings
from pilotflame.runtime.ground.storing.file_documents import FileDocuments


def loaded(state: Path) -> Keyring:
    documents = FileDocuments(state)
    documents.remove_leftovers(ACCESS)
    keyring = Keyring(documents)
    keyring.load()
    return keyring


def test_keys_outlive_the_process(tmp_path: Path):
    key, token = loaded(tmp_path).create(NewKey(name="a", functions=("f",), rate_per_s=2.0), 100.0)
    again = loaded(tmp_path)
    held = again.find(token, 101.0)
    assert held is not None
    assert held.key == key
    assert (held.caller.owner, held.caller.allows("f"), held.caller.allows("g")) == (key.id, True, False)


def test_the_file_is_its_owners_and_holds_no_token(tmp_path: Path):
    keyring = loaded(tmp_path)
    assert not keyring.exists
    _, token = keyring.create(NewKey(name="a"), 0.0)
    assert keyring.exists
    assert stat.S_IMODE((tmp_path / KEYS).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / KEYS).parent.stat().st_mode) == 0o700
    assert token.rpartition("_")[2] not in (tmp_path / KEYS).read_text()
    assert {path.name for path in (tmp_path / KEYS).parent.iterdir()} == {"keys.json", "closed"}


def test_a_revoked_key_is_gone_and_the_gateway_stays_closed(tmp_path: Path):
    keyring = loaded(tmp_path)
    key, token = keyring.create(NewKey(name="a"), 0.0)
    keyring.revoke(key.id)
    for one in (keyring, loaded(tmp_path)):
        assert one.find(token, 1.0) is None
        assert one.all() == []
        assert one.exists
    with pytest.raises(UnknownKey, match=key.id):
        keyring.revoke(key.id)


def test_a_revoked_key_still_limits_what_was_deployed_with_it(tmp_path: Path):
    keyring = loaded(tmp_path)
    key, _ = keyring.create(NewKey(name="a", scopes=(Scope.DEPLOY,), max_workers=3), 0.0)
    keyring.revoke(key.id)
    assert [one.max_workers(key.id) for one in (keyring, loaded(tmp_path))] == [3, 3]


@pytest.mark.parametrize("token", ["", "pf_", "Bearer", "pf_000000000000_" + "0" * 64, "ä" * 80])
def test_an_unknown_token_finds_no_key(tmp_path: Path, token: str):
    keyring = loaded(tmp_path)
    keyring.create(NewKey(name="a"), 0.0)
    assert keyring.find(token, 1.0) is None


def test_uses_are_noted_coarsely_and_saved(tmp_path: Path):
    keyring = loaded(tmp_path)
    _, token = keyring.create(NewKey(name="a"), 0.0)
    held = keyring.find(token, 0.0)
    assert held is not None
    at_s = 10 * USE_GRAIN_S + 17
    assert held.used(at_s)
    assert not held.used(at_s + 5)
    keyring.save()
    assert loaded(tmp_path).all()[0].last_used_s == 10 * USE_GRAIN_S
    assert held.used(at_s + USE_GRAIN_S)


def test_a_key_that_was_never_used_has_no_time_of_last_use(tmp_path: Path):
    keyring = loaded(tmp_path)
    keyring.create(NewKey(name="a"), 0.0)
    for one in (keyring, loaded(tmp_path)):
        assert [key.last_used_s for key in one.all()] == [None]


def test_a_signers_key_is_found_by_its_id_until_it_expires(tmp_path: Path):
    keyring = loaded(tmp_path)
    key, token = keyring.create(NewKey(name="a", expires_in_s=60.0), 100.0)
    found = keyring.signer(key.id, 159.0)
    assert found is not None
    assert found is keyring.find(token, 159.0)
    assert keyring.signer(key.id, 160.0) is None
    assert keyring.signer("0" * 12, 100.0) is None


def test_an_expired_key_still_limits_workers(tmp_path: Path):
    keyring = loaded(tmp_path)
    new = NewKey(name="a", scopes=(Scope.DEPLOY,), max_workers=3, expires_in_s=60.0)
    limited, _ = keyring.create(new, -1000.0)
    other, _ = keyring.create(NewKey(name="b"), 0.0)
    assert (keyring.max_workers(limited.id), keyring.max_workers(other.id)) == (3, None)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "it is no JSON object"),
        ("{", "it is no JSON object"),
        ("[]", "it is no JSON object"),
        ('{"keys": [{}]}', r"the field keys\.0\.name is wrong \(missing\)"),
        ('{"version": 1, "keys": 1}', "the field keys is wrong"),
    ],
)
def test_a_damaged_file_stops_the_gateway(tmp_path: Path, text: str, fault: str):
    keyring = loaded(tmp_path)
    keyring.create(NewKey(name="a"), 0.0)
    (tmp_path / KEYS).write_text(text)
    with pytest.raises(GatewayError, match=rf"keys\.json is damaged: {fault}"):
        Keyring(FileDocuments(tmp_path)).load()


def stored(state: Path) -> Any:
    return json.loads((state / KEYS).read_text())


def store(state: Path, file: Any) -> None:
    (state / KEYS).write_text(json.dumps(file))


def test_what_a_newer_version_has_stored_is_kept_and_not_shown(tmp_path: Path):
    keyring = loaded(tmp_path)
    key, token = keyring.create(NewKey(name="a"), 0.0)
    gone, _ = keyring.create(NewKey(name="b", scopes=(Scope.DEPLOY,), max_workers=3), 1.0)
    keyring.revoke(gone.id)
    file = stored(tmp_path)
    file["more"], file["keys"][0]["secret_digest"], file["revoked"][0]["zone"] = {"of": [1]}, "d", None
    store(tmp_path, file)
    older = loaded(tmp_path)
    held = older.find(token, 1.0)
    assert held is not None
    assert held.key.shown() == key.shown()
    assert held.used(9 * USE_GRAIN_S)
    older.save()
    other, _ = older.create(NewKey(name="c"), 2.0)
    older.revoke(other.id)
    file["keys"][0]["last_used_s"] = 9 * USE_GRAIN_S
    assert stored(tmp_path) == file | {"revoked": file["revoked"]}
    assert older.max_workers(gone.id) == 3


SETTINGS = FunctionSettings.model_validate(
    {"name": "f", "image": {"name": "x"}, "resources": {"memory_mb": 64}}
)


def test_limits_of_deploys_that_only_a_newer_version_knows_allow_nothing(tmp_path: Path):
    keyring = loaded(tmp_path)
    key, _ = keyring.create(NewKey(name="a", scopes=(Scope.DEPLOY,)), 0.0)
    policies = DeployPolicies(of_key=lambda key_id: loaded(tmp_path).policy(key_id))
    file = stored(tmp_path)
    # A limit with the value null is not set, so an unknown one refuses nothing.
    file["keys"][0]["policy"]["regions"] = None
    store(tmp_path, file)
    assert policies.fault(SETTINGS, {}, key.id) == ""
    file["keys"][0]["policy"]["regions"] = ["eu"]
    store(tmp_path, file)
    assert "does not know the limit regions" in policies.fault(SETTINGS, {}, key.id)
    older = loaded(tmp_path)
    older.revoke(key.id)
    assert "does not know the limit regions" in policies.fault(SETTINGS, {}, key.id)
    assert stored(tmp_path)["revoked"][0]["policy"]["regions"] == ["eu"]


def test_conditions_of_tokens_that_only_a_newer_version_knows_refuse_them(tmp_path: Path):
    issuer = TokenIssuer(url="https://issuer", audience="a", subject="*")
    keyring = loaded(tmp_path)
    keyring.create(NewKey(name="a", issuer=issuer), 0.0)
    file = stored(tmp_path)
    for unknown, count in ((None, 1), ("x", 0)):
        file["keys"][0]["issuer"]["branch"] = unknown
        store(tmp_path, file)
        assert len(loaded(tmp_path).of_issuer("https://issuer", 1.0)) == count


def test_a_key_that_was_changed_gets_its_new_limits(tmp_path: Path):
    keyring = loaded(tmp_path)
    keys = [keyring.create(NewKey(name=name, concurrency=1), 0.0) for name in "ab"]
    before = [keyring.find(token, 0.0) for _, token in keys]
    file = stored(tmp_path)
    file["keys"][0]["concurrency"] = 2
    store(tmp_path, file)
    keyring.load()
    changed, same = (keyring.find(token, 0.0) for _, token in keys)
    assert changed is not None
    assert [changed.meter.enter(0.0) for _ in range(2)] == [0.0, 0.0]
    assert same is before[1]


def test_a_failed_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keyring = loaded(tmp_path)
    key, token = keyring.create(NewKey(name="a"), 0.0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(GatewayError, match="No space left"):
            keyring.create(NewKey(name="b"), 0.0)
        with pytest.raises(GatewayError, match="No space left"):
            keyring.revoke(key.id)
    for one in (keyring, loaded(tmp_path)):
        assert [known.name for known in one.all()] == ["a"]
        assert one.find(token, 1.0) is not None


def test_half_written_files_are_removed(tmp_path: Path):
    keyring = loaded(tmp_path)
    keyring.create(NewKey(name="a"), 0.0)
    ((tmp_path / KEYS).parent / ".keys.json.x1y2").write_text('{"ver')
    assert len(loaded(tmp_path).all()) == 1
    assert {path.name for path in (tmp_path / KEYS).parent.iterdir()} == {"keys.json", "closed"}


def test_lost_keys_open_no_gateway(tmp_path: Path):
    """This includes keys that an older release has written, without the file `closed`."""
    keyring = loaded(tmp_path)
    keyring.create(NewKey(name="a"), 0.0)
    (tmp_path / "access" / "closed").unlink()
    loaded(tmp_path)
    (tmp_path / KEYS).unlink()
    with pytest.raises(GatewayError, match=r"keys\.json is missing") as caught:
        loaded(tmp_path)
    assert "closed" in caught.value.remedy
    (tmp_path / "access" / "closed").unlink()
    assert not loaded(tmp_path).exists


def two_gateways(state: Path) -> tuple[Keyring, Keyring]:
    documents = FileDocuments(state)
    one, other = Keyring(documents), Keyring(documents)
    one.load()
    other.load()
    return one, other


def test_two_gateways_lose_no_key_of_each_other(tmp_path: Path):
    one, other = two_gateways(tmp_path)
    first, first_token = one.create(NewKey(name="first", rate_per_s=1.0), 0.0)
    second, second_token = other.create(NewKey(name="second", max_workers=2, scopes=(Scope.DEPLOY,)), 1.0)
    one.save()
    for keyring in (one, other, loaded(tmp_path)):
        assert [key.name for key in keyring.all()] == ["first", "second"]
        assert keyring.find(first_token, 2.0) is not None
        assert keyring.find(second_token, 2.0) is not None
        assert keyring.exists
    # Each gateway revokes a key of the other one.
    assert other.revoke(first.id) == first
    one.revoke(second.id)
    with pytest.raises(UnknownKey, match=first.id):
        one.revoke(first.id)
    other.save()
    for keyring in (one, other, loaded(tmp_path)):
        assert keyring.all() == []
        assert keyring.max_workers(second.id) == 2


def test_a_refused_revocation_shows_what_another_gateway_has_changed(tmp_path: Path):
    one, other = two_gateways(tmp_path)
    key, token = one.create(NewKey(name="a"), 0.0)
    other.load()
    other.revoke(key.id)
    assert one.find(token, 1.0) is not None
    with pytest.raises(UnknownKey):
        one.revoke(key.id)
    assert one.find(token, 1.0) is None


def test_meters_and_times_of_use_go_on_when_another_gateway_changes_keys(tmp_path: Path):
    one, other = two_gateways(tmp_path)
    key, token = one.create(NewKey(name="a", concurrency=1), 0.0)
    other.load()
    held, also = one.find(token, 0.0), other.find(token, 0.0)
    assert held is not None
    assert also is not None
    assert held.meter.enter(0.0) == 0.0
    assert also.used(9 * USE_GRAIN_S)
    other.create(NewKey(name="b"), 1.0)
    assert held.used(3 * USE_GRAIN_S)
    one.save()
    one.load()
    assert one.find(token, 0.0) is held
    assert (held.meter.running, one.meter(key.id)) == (1, held.meter)
    # The latest use at any gateway counts.
    assert [known.last_used_s for known in loaded(tmp_path).all()] == [9 * USE_GRAIN_S, None]


def test_keys_that_were_removed_by_hand_are_stored_again(tmp_path: Path):
    keyring = loaded(tmp_path)
    keyring.create(NewKey(name="a"), 0.0)
    (tmp_path / KEYS).unlink()
    keyring.save()
    assert [key.name for key in loaded(tmp_path).all()] == ["a"]


def test_damaged_keys_are_not_replaced(tmp_path: Path):
    """Damaged keys may be the keys of a newer release."""
    keyring = loaded(tmp_path)
    key, token = keyring.create(NewKey(name="a"), 0.0)
    (tmp_path / KEYS).write_text('{"version": 2}{')
    for change in (
        keyring.save,
        lambda: keyring.revoke(key.id),
        lambda: keyring.create(NewKey(name="b"), 0.0),
    ):
        with pytest.raises(GatewayError, match=r"keys\.json is damaged"):
            change()
    assert keyring.find(token, 1.0) is not None
    assert (tmp_path / KEYS).read_text() == '{"version": 2}{'


def test_threads_may_change_it_at_once(tmp_path: Path):
    keyring = loaded(tmp_path)

    def change(number: int) -> None:
        key, _ = keyring.create(NewKey(name=f"n{number}"), float(number))
        if number % 2:
            keyring.revoke(key.id)

    threads = [threading.Thread(target=change, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [key.name for key in keyring.all()] == ["n0", "n2", "n4", "n6"]
    assert loaded(tmp_path).all() == keyring.all()


# Quotas: never more than the limits, and a caller that waits for the stated time is admitted.

RATES = st.floats(min_value=1e-3, max_value=1e4)
GAPS = st.lists(st.floats(min_value=0.0, max_value=1e4), max_size=60)


@given(RATES, st.integers(1, 100), GAPS, st.floats(min_value=0.0, max_value=1e9))
def test_never_more_than_burst_and_rate_grant(rate: float, burst: int, gaps: list[float], start_s: float):
    meter, now_s, taken = Meter(rate, burst, None, start_s), start_s, list[float]()
    for gap_s in gaps:
        now_s += gap_s
        if meter.enter(now_s) == 0.0:
            taken.append(now_s)
    for first, since_s in enumerate(taken):
        granted = burst + (now_s - since_s) * rate
        assert len(taken) - first <= granted * (1 + 1e-6) + 1e-6


@given(RATES, st.integers(1, 100), GAPS, st.floats(min_value=0.0, max_value=1e9))
def test_a_caller_who_waits_as_told_is_admitted(rate: float, burst: int, gaps: list[float], start_s: float):
    meter, now_s = Meter(rate, burst, None, start_s), start_s
    for gap_s in gaps:
        now_s += gap_s
        if wait_s := meter.enter(now_s):
            assert wait_s > 0
            # The caller waits for whole seconds, because Retry-After has whole seconds.
            now_s += max(1, math.ceil(wait_s))
            assert meter.enter(now_s) == 0.0


@given(RATES, st.integers(1, 100), st.integers(1, 50))
def test_a_refused_request_costs_nothing(rate: float, burst: int, asked: int):
    patient, impatient = Meter(rate, burst, None, 0.0), Meter(rate, burst, None, 0.0)
    for meter in (patient, impatient):
        assert [meter.enter(0.0) for _ in range(burst)] == [0.0] * burst
    waits = {impatient.enter(0.0) for _ in range(asked)}
    assert waits == {patient.enter(0.0)}
    assert patient.enter(waits.pop()) == 0.0


def test_a_clock_that_goes_back_refills_nothing():
    meter = Meter(1.0, 1, None, 100.0)
    assert meter.enter(100.0) == 0.0
    assert meter.enter(50.0) == 1.0
    assert meter.enter(101.0) == 0.0


def test_concurrency_counts_those_that_run():
    meter = Meter(None, None, 2, 0.0)
    assert [meter.enter(0.0), meter.enter(0.0)] == [0.0, 0.0]
    assert meter.enter(0.0) > 0
    meter.leave()
    assert meter.enter(0.0) == 0.0
    assert meter.running == 2


def test_a_request_refused_for_one_quota_does_not_use_the_other():
    meter = Meter(1.0, 2, 1, 0.0)
    assert meter.enter(0.0) == 0.0
    # This request is refused because another one is running. So it takes no token of the rate.
    assert meter.enter(0.0) > 0
    meter.leave()
    assert meter.enter(0.0) == 0.0
    meter.leave()
    assert meter.enter(0.0) == pytest.approx(1.0)
    assert meter.running == 0


def test_without_a_quota_all_requests_are_admitted():
    meter = Meter(None, None, None, 0.0)
    assert all(meter.enter(0.0) == 0.0 for _ in range(10_000))


@pytest.mark.parametrize(("rate", "burst"), [(0.1, 1), (1.0, 1), (2.5, 3), (20.0, 20)])
def test_without_a_burst_one_second_of_the_rate_is_admitted_at_once(rate: float, burst: int):
    meter = Meter(rate, None, None, 0.0)
    assert [meter.enter(0.0) for _ in range(burst)] == [0.0] * burst
    assert meter.enter(0.0) > 0


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50), st.integers(0, 60)), max_size=30),
    st.integers(1, 600),
)
def test_tokens_of_models_over_time_are_within_the_limit(
    steps: list[tuple[float, int, int]], most: int
) -> None:
    meter, now_s, taken, last = Meter(None, None, None, 0.0, most), 0.0, 0, 0
    for gap_s, asked, used in steps:
        now_s += gap_s
        wait_s, reservation = meter.reserve(now_s, 1, asked, patient=False)
        if reservation is not None:
            # All answers but the last used at most the tokens of a full bucket and the tokens that it has gained.
            assert taken - last <= most + now_s * most / 60 + 1e-6
            reservation.settle(used)
            reservation.settle(1_000_000)
            taken, last = taken + used, used
        else:
            assert meter.limit == "model_tokens_per_min"
            again, _ = copy.deepcopy(meter).reserve(now_s + wait_s + 1e-6, 1, asked, patient=False)
            assert again == 0.0


def test_tokens_are_reserved_until_the_end() -> None:
    meter = Meter(None, None, None, 0.0, 600)
    _, first = meter.reserve(0.0, 1, 400, patient=False)
    assert first is not None
    assert meter.reserve(0.0, 1, 400, patient=False) == (20.0, None)
    first.settle(100)
    assert meter.reserve(0.0, 1, 400, patient=False)[0] == 0.0


@pytest.mark.parametrize(("asked", "most"), [(0, MOST_CALL_MIN * 600), (60_000, 60_000)])
def test_a_handler_takes_at_most_what_the_caller_allowed_or_ten_minutes_of_the_limit(
    asked: int, most: int
) -> None:
    meter = Meter(None, None, None, 0.0, 600)
    for _ in range(2):
        _, reservation = meter.reserve(0.0, 1, 100, asked=asked, patient=True)
        assert reservation is not None
        reservation.settle(2**62)
    # Both calls are charged, although they ended at the same moment.
    assert meter.enter(0.0) == pytest.approx((2 * most - 600) / 10)


def test_parts_of_an_admitted_request_are_not_refused() -> None:
    meter = Meter(1.0, 4, 4, 0.0, 1000)
    assert meter.enter(0.0) == 0.0
    # The request has ten prompts, more than `burst` and `concurrency` allow.
    assert meter.widen(0.0, 9, 1) == 0.0
    for _ in range(10):
        wait_s, reservation = meter.reserve(0.0, 1, 10)
        assert wait_s == 0.0
        assert reservation is not None
        reservation.settle(10)
    meter.leave(10)
    assert meter.running == 0


def test_a_refused_request_gives_back_all_that_it_took() -> None:
    meter = Meter(1.0, 4, None, 0.0)
    assert meter.enter(0.0) == 0.0
    assert meter.widen(0.0, 2, 1) == 0.0
    # The last token goes to another request.
    assert meter.enter(0.0) == 0.0
    assert meter.widen(0.0, 1, 3) == pytest.approx(1.0)
    assert [meter.enter(0.0) for _ in range(4)] == [0.0, 0.0, 0.0, pytest.approx(1.0)]


def test_a_request_for_several_answers_counts_as_several() -> None:
    meter = Meter(1.0, 4, 8, 0.0)
    assert meter.enter(0.0) == 0.0
    _, reservation = meter.reserve(0.0, 4, 0, patient=False)
    assert reservation is not None
    assert meter.running == 4
    # A request for more answers than the bucket can hold is admitted when the bucket is full. Later requests wait until the
    # bucket has regained all these tokens.
    assert (meter.enter(0.0), meter.limit) == (pytest.approx(1.0), "rate_per_s")
    assert meter.enter(4.0) == 0.0
    assert (meter.reserve(4.0, 128, 0, patient=False), meter.limit) == ((1.0, None), "concurrency")
    reservation.settle(0)
    meter.leave()
    wait_s, reservation = meter.reserve(5.0, 128, 0, patient=False)
    assert (wait_s, meter.running) == (0.0, 128)
    assert meter.enter(6.0) == 1.0
    assert reservation is not None
    reservation.settle(0)
    meter.leave()
    assert meter.running == 0
    assert meter.enter(60.0) == pytest.approx(128 - 59, abs=4)
