"""Identity: the ids of jobs, and the digests by which ids and idempotency keys are found again."""

from __future__ import annotations

import base64
import hashlib
import secrets

GENERATED = "job-"
"""How ids begin that nobody chose."""
_TIME_BYTES = 6
_RANDOM_BYTES = 10
_LENGTH = 26


def new_job_id(now_s: float) -> str:
    """An id that sorts by time, so that the index of ids is appended to, and that nobody can guess (80 random bits)."""
    time_ms = max(0, int(now_s * 1000)) % (1 << 8 * _TIME_BYTES)
    number = time_ms.to_bytes(_TIME_BYTES, "big") + secrets.token_bytes(_RANDOM_BYTES)
    return GENERATED + base64.b32hexencode(number).decode().lower()[:_LENGTH]


def idempotency_digest(function: str, owner: str, key: str) -> bytes | None:
    """What stands for a caller's idempotency key; None where there is none."""
    return _digest(16, function, owner, key) if key else None


def tombstone_key(function: str, job_id: str) -> int:
    """What stands for the id of a forgotten job: 64 bits."""
    return int.from_bytes(_digest(8, function, job_id), "big", signed=True)


def _digest(size: int, *parts: str) -> bytes:
    # Parts are told apart by their lengths. Header values may hold what is no text (surrogates).
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    whole = b"".join(b"%d:%s" % (len(part), part) for part in encoded)
    return hashlib.blake2b(whole, digest_size=size).digest()
