"""Signatures: receivers verify them with the standardwebhooks package; each function has a secret of its own."""

import base64
import json
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import GatewayError
from pilotflame.runtime.ground.storing.file_documents import FileDocuments
from pilotflame.runtime.jobs.webhooks.signing import SigningKey, load_key
from standardwebhooks import Webhook, WebhookVerificationError

KEY = SigningKey(b"k" * 32)
RECEIVER = Webhook(KEY.secret)


@given(st.dictionaries(st.text(), st.integers() | st.text()))
def test_receivers_verify_the_signature(payload: dict[str, object]) -> None:
    body = json.dumps(payload, ensure_ascii=False).encode("utf-8", "replace")
    headers = KEY.headers("msg_1", body, time.time())
    assert RECEIVER.verify(body, headers) == json.loads(body)


def test_the_example_of_the_specification() -> None:
    key = SigningKey(base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"))
    assert key.secret == "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    headers = key.headers("msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', 1614265330)
    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_the_signature_covers_id_timestamp_body_and_key() -> None:
    now_s = time.time()
    headers = KEY.headers("msg_1", b"{}", now_s)
    other_keys = SigningKey(b"o" * 32).headers("msg_1", b"{}", now_s)
    for changed, body in (
        (headers, b"{ }"),
        (headers | {"webhook-id": "msg_2"}, b"{}"),
        (headers | {"webhook-timestamp": str(int(now_s) + 1)}, b"{}"),
        (other_keys, b"{}"),
    ):
        with pytest.raises(WebhookVerificationError):
            RECEIVER.verify(body, changed)


def test_a_body_that_is_not_text_is_signed() -> None:
    assert KEY.headers("msg_1", b"\xff", 1000.0)["webhook-signature"].startswith("v1,")


def test_each_function_has_a_key_of_its_own() -> None:
    one, other = KEY.of("one"), KEY.of("other")
    assert one.secret == KEY.of("one").secret
    assert len({one.secret, other.secret, KEY.secret}) == 3
    headers = one.headers("m", b"{}", time.time())
    assert Webhook(one.secret).verify(b"{}", headers) == {}
    for key in (other, KEY):
        with pytest.raises(WebhookVerificationError):
            Webhook(key.secret).verify(b"{}", headers)


def test_derived_secrets_stay_what_earlier_versions_derived() -> None:
    """Receivers have configured these secrets, so they must not change."""
    assert KEY.of("tone").secret == "whsec_wVFWPh82+pGcr2J5OO9vVdQb2F+PAy7ZrMLdqsLEDAc="


def test_a_gateway_creates_its_secret_once_for_its_owner_only(tmp_path: Path) -> None:
    created = load_key(FileDocuments(tmp_path))
    (path,) = tmp_path.iterdir()
    assert path.name == "webhook-secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_key(FileDocuments(tmp_path)).secret == created.secret == path.read_text().strip()
    assert len(base64.b64decode(created.secret.removeprefix("whsec_"))) == 32
    assert created.secret not in repr(created)


@pytest.mark.parametrize("text", ["", "whsec_", "whsec_QQ==", "hush", "whsec_ä", "whsec_%%%", "A" * 44])
def test_an_invalid_secret_is_reported_without_showing_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "webhook-secret").write_text(text)
    with pytest.raises(GatewayError, match="does not hold a webhook secret") as refused:
        load_key(FileDocuments(tmp_path))
    assert not text or text not in str(refused.value)


def test_a_secret_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GatewayError, match="file/webhook-secret"):
        load_key(FileDocuments(tmp_path / "file"))


def test_gateways_that_start_at_once_have_one_secret(tmp_path: Path) -> None:
    documents = FileDocuments(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        assert len({key.secret for key in threads.map(load_key, [documents] * 8)}) == 1
    before = (tmp_path / "webhook-secret").stat().st_mtime_ns
    load_key(documents)
    assert (tmp_path / "webhook-secret").stat().st_mtime_ns == before
