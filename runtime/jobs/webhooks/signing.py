"""Signs webhooks as https://www.standardwebhooks.com defines it, with one secret per function.

Each function's secret is derived from the gateway's secret. So a receiver, which knows the secret of one function,
cannot sign messages of another function. Signatures that the gateway makes for itself have separate keys.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Callable

from ....errors import GatewayError
from ...ground.storing.documents import Documents

PREFIX = "whsec_"
SECRET_FILE = "webhook-secret"  # noqa: S105
SECRET_BYTES = 32
MIN_BYTES, MAX_BYTES = 24, 64
"""The smallest and the largest size of a secret that Standard Webhooks allows."""


class SigningKey:
    """A secret that signs messages. The repr does not show the secret."""

    __slots__ = ("_key", "_signed_as")

    def __init__(self, key: bytes, signed_as: Callable[[str], str] = str) -> None:
        """`signed_as` returns the name from which the key of a function is made: by default, the function's name."""
        self._key, self._signed_as = key, signed_as

    @property
    def secret(self) -> str:
        """The secret in the text form that receivers configure. Never log it."""
        return PREFIX + base64.b64encode(self._key).decode()

    def of(self, function: str) -> SigningKey:
        """Return a function's key: the HMAC-SHA256 of the name that `signed_as` returns, under the gateway's key."""
        return self._derived(self._signed_as(function))

    def of_owner(self, owner: str) -> SigningKey:
        """Return the key that signs the webhooks of all jobs of an owner, which is an API key. Replicate, too, has one
        signing key for each account.
        """
        return self._derived(f"owner:{owner}")

    def _derived(self, name: str) -> SigningKey:
        return SigningKey(hmac.digest(self._key, name.encode(), hashlib.sha256))

    def seal(self, purpose: str, text: str) -> str:
        """Return a signature of `text` that only this gateway can make. Each purpose has its own key, which no receiver
        knows.

        This key differs from the keys of functions and owners, because the names from which those keys are made do not
        begin with `seal:`.
        """
        key = hmac.digest(self._key, f"seal:{purpose}".encode(), hashlib.sha256)
        return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()

    def sign(self, message_id: str, body: bytes, now_s: float) -> str:
        """Return the signature of a message that is sent at this time."""
        digest = hmac.new(self._key, f"{message_id}.{int(now_s)}.".encode(), hashlib.sha256)
        # `update` neither copies a large body, nor holds the interpreter's lock while it hashes the body.
        digest.update(body)
        return f"v1,{base64.b64encode(digest.digest()).decode()}"

    def headers(self, message_id: str, body: bytes, now_s: float, *others: SigningKey) -> dict[str, str]:
        """Return the headers with the message's id, the time `now_s` of this attempt and a signature by each key."""
        signatures = [key.sign(message_id, body, now_s) for key in (self, *others)]
        return {
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now_s)),
            "webhook-signature": " ".join(signatures),
        }


def load_key(documents: Documents, signed_as: Callable[[str], str] = str) -> SigningKey:
    """Return the gateway's key from its documents, or create it there. Blocks. For `signed_as` see SigningKey.

    Raise GatewayError if the document is damaged or cannot be used.
    """
    new = SigningKey(secrets.token_bytes(SECRET_BYTES)).secret.encode() + b"\n"
    secret = documents.update(SECRET_FILE, lambda stored: new if stored is None else stored) or b""
    prefix, text = PREFIX.encode(), secret.strip()
    with contextlib.suppress(ValueError):
        key_bytes = base64.b64decode(text.removeprefix(prefix), validate=True)
        if text.startswith(prefix) and MIN_BYTES <= len(key_bytes) <= MAX_BYTES:
            return SigningKey(key_bytes, signed_as)
    raise GatewayError(
        f"{documents.place(SECRET_FILE)} does not hold a webhook secret.",
        remedy="Remove it: a new secret is created, which receivers have to be told.",
    )
