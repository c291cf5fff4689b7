"""Signatures: the standardwebhooks package verifies ours, we verify its, and nothing else."""

import base64
import json
import stat
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import standardwebhooks
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import GatewayError
from pilotflame.runtime.jobs.webhook_signing import SigningKey, load_key

KEY = SigningKey(b"k" * 32)
THEIRS = standardwebhooks.Webhook(KEY.secret)


@given(st.dictionaries(st.text(), st.integers() | st.text()))
def test_the_package_verifies_what_we_sign(payload: dict[str, object]) -> None:
    body = json.dumps(payload).encode()
    headers = KEY.headers("msg_1", body, time.time())
    assert THEIRS.verify(body, headers) == payload


def test_we_verify_what_the_package_signs() -> None:
    now = time.time()
    signature = THEIRS.sign("msg_2", datetime.fromtimestamp(int(now), UTC), "{}")
    headers = {"Webhook-Id": "msg_2", "Webhook-Timestamp": str(int(now)), "Webhook-Signature": signature}
    assert KEY.verify(headers, b"{}", now)


def test_the_example_of_the_specification() -> None:
    key = SigningKey.parse("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    headers = key.headers("msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', 1614265330)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@given(st.binary(), st.text(st.characters(exclude_categories=["Cs"])), st.data())
def test_what_was_changed_is_noticed(body: bytes, message_id: str, data: st.DataObject) -> None:
    headers = KEY.headers(message_id, body, 1000.0)
    assert KEY.verify(headers, body, 1000.0)
    assert not KEY.verify(headers, body + b"x", 1000.0)
    assert not KEY.verify(headers | {"webhook-id": message_id + "x"}, body, 1000.0)
    assert not KEY.verify(headers | {"webhook-timestamp": "1001"}, body, 1000.0)
    assert not SigningKey(b"o" * 32).verify(headers, body, 1000.0)


def test_old_and_future_ones_are_refused() -> None:
    headers = KEY.headers("m", b"", 1000.0)
    assert KEY.verify(headers, b"", 1300.0)
    assert not KEY.verify(headers, b"", 1301.0)
    assert not KEY.verify(headers, b"", 699.0)


def test_one_of_several_signatures_suffices() -> None:
    headers = KEY.headers("m", b"", 1000.0)
    ours = headers["webhook-signature"]
    assert KEY.verify(headers | {"webhook-signature": f"v1a,xx v1,!! v1,QQ== {ours}"}, b"", 1000.0)
    assert not KEY.verify(headers | {"webhook-signature": ours.replace("v1,", "v2,")}, b"", 1000.0)


@given(st.dictionaries(st.sampled_from(["webhook-id", "webhook-timestamp", "webhook-signature"]), st.text()))
def test_no_headers_break_it(headers: dict[str, str]) -> None:
    assert not KEY.verify(headers, b"", 1000.0)


def test_each_function_has_a_key_of_its_own() -> None:
    one, other = KEY.of("one"), KEY.of("other")
    assert one.secret == KEY.of("one").secret
    assert one.secret.startswith("whsec_")
    assert len({one.secret, other.secret, KEY.secret}) == 3
    headers = one.headers("m", b"{}", time.time())
    assert standardwebhooks.Webhook(one.secret).verify(b"{}", headers) == {}
    assert not other.verify(headers, b"{}", time.time())
    assert not KEY.verify(headers, b"{}", time.time())


def test_a_gateway_makes_its_secret_once_for_its_owner_only(tmp_path: Path) -> None:
    made = load_key(tmp_path)
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_key(tmp_path).secret == made.secret == path.read_text().strip()
    assert len(base64.b64decode(made.secret.removeprefix("whsec_"))) == 32
    assert made.secret not in repr(made)


def test_what_a_crash_left_half_made_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "webhook-secret.new").write_text("whs")
    load_key(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["webhook-secret"]


@pytest.mark.parametrize("text", ["", "whsec_", "whsec_QQ==", "geheim", "whsec_ä", "whsec_%%%", "A" * 44])
def test_a_broken_secret_is_said_without_showing_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "webhook-secret").write_text(text)
    with pytest.raises(GatewayError, match="does not hold a webhook secret") as refused:
        load_key(tmp_path)
    assert not text or text not in str(refused.value)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(GatewayError, match="nowhere"):
        load_key(tmp_path / "nowhere")
