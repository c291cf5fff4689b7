"""Signatures of webhooks, after Standard Webhooks (https://www.standardwebhooks.com): one secret per function.

They are derived from the gateway's own, which nobody is told: who may verify what one function sends can sign for no other.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from ...errors import GatewayError
from ...snapshot.publish import sync

PREFIX = "whsec_"
SECRET_FILE = "webhook-secret"  # noqa: S105  its name
SECRET_BYTES = 32
LEAST_BYTES, MOST_BYTES = 24, 64
TOLERANCE_S = 300.0
"""How far apart the clocks of sender and receiver may be."""


class SigningKey:
    """Signs what is sent and verifies what came. Does not show its secret when printed."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def parse(cls, secret: str) -> SigningKey:
        """The key of a `whsec_…` text. ValueError if that is none; the message does not show it."""
        try:
            key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
        except (binascii.Error, ValueError):
            raise ValueError("not whsec_ and base64") from None
        if not secret.startswith(PREFIX) or not LEAST_BYTES <= len(key) <= MOST_BYTES:
            raise ValueError(f"not whsec_ and base64 of {LEAST_BYTES} to {MOST_BYTES} bytes")
        return cls(key)

    @property
    def secret(self) -> str:
        """What a receiver needs in order to verify: to be shown to who may see it, and never logged."""
        return PREFIX + base64.b64encode(self._key).decode()

    def of(self, function: str) -> SigningKey:
        """The key of one function, if this is the gateway's: HMAC-SHA256 of the function's name."""
        return SigningKey(hmac.digest(self._key, function.encode(), hashlib.sha256))

    def headers(self, message_id: str, body: bytes, now_s: float) -> dict[str, str]:
        """The three headers that go with a body. The timestamp is that of this attempt; the id stays over retries."""
        timestamp = str(int(now_s))
        return {
            "webhook-id": message_id,
            "webhook-timestamp": timestamp,
            "webhook-signature": "v1," + base64.b64encode(self._digest(message_id, timestamp, body)).decode(),
        }

    def verify(
        self, headers: Mapping[str, str], body: bytes, now_s: float, *, tolerance_s: float = TOLERANCE_S
    ) -> bool:
        """Whether the body was signed with this key, and lately; header names in any case."""
        given = {name.lower(): value for name, value in headers.items()}
        timestamp = given.get("webhook-timestamp", "")
        if not (timestamp.isascii() and timestamp.isdecimal() and len(timestamp) < 16):
            return False
        if abs(int(timestamp) - now_s) > tolerance_s:
            return False
        wanted = self._digest(given.get("webhook-id", ""), timestamp, body)
        return any(
            hmac.compare_digest(wanted, found) for found in _digests(given.get("webhook-signature", ""))
        )

    def _digest(self, message_id: str, timestamp: str, body: bytes) -> bytes:
        # surrogateescape: the headers of strangers may hold any bytes
        signed = f"{message_id}.{timestamp}.".encode("utf-8", "surrogateescape")
        return hmac.digest(self._key, signed + body, hashlib.sha256)


def load_key(state_dir: Path) -> SigningKey:
    """The gateway's key, from its state folder; made there at first use, for its owner's eyes only. Blocks."""
    path = state_dir / SECRET_FILE
    try:
        with contextlib.suppress(FileNotFoundError):
            return SigningKey.parse(path.read_text(encoding="ascii").strip())
        return _make(path)
    except ValueError as error:  # UnicodeDecodeError too; neither shows the secret
        raise GatewayError(
            f"{path} does not hold a webhook secret.",
            remedy="Remove it: a new one is made, of which receivers have to be told.",
        ) from (None if isinstance(error, UnicodeDecodeError) else error)
    except OSError as error:
        raise GatewayError(
            f"The webhook secret {path} cannot be read or made: {error.strerror}.",
            remedy="Make it a file of the gateway's user, or remove it.",
        ) from error


def _make(path: Path) -> SigningKey:
    key = SigningKey(secrets.token_bytes(SECRET_BYTES))
    unfinished = path.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:  # noqa: PTH123  a descriptor
        file.write(key.secret + "\n")
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    sync(path.parent)
    return key


def _digests(signatures: str) -> list[bytes]:
    """Those of version 1: several may stand there, with spaces between, while a secret is changed."""
    found = []
    for signature in signatures.split():
        version, _, text = signature.partition(",")
        if version == "v1":
            with contextlib.suppress(binascii.Error, ValueError):
                found.append(base64.b64decode(text, validate=True))
    return found
