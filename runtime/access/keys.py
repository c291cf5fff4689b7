"""The API key: what its owner may do, and how it is written down without being known."""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
import secrets
from datetime import UTC, datetime
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ...errors import BadInput
from ..settings.function_settings import name_problem

_YEAR_S = 365 * 24 * 3600.0
_TOKEN = re.compile(r"pf_([0-9a-f]{12})_[0-9a-f]{64}")
# What a key that is not known is compared with, so that it takes as long as one that is.
_NOBODY = hashlib.sha256(b"").hexdigest()


class Scope(enum.StrEnum):
    """What may be done. ADMIN is everything."""

    INVOKE = "invoke"
    DEPLOY = "deploy"
    ADMIN = "admin"


class NewKey(BaseModel):
    """What somebody wants a key to be."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(pattern=r"^[\x20-\x7e]{1,64}$", description="For people: whom it was given to.")
    scopes: tuple[Scope, ...] = Field((Scope.INVOKE,), min_length=1)
    functions: tuple[str, ...] | None = Field(
        None, max_length=1000, description="The only functions it covers; null: all."
    )
    rate_per_s: float | None = Field(None, gt=0, le=1e6, description="Requests a second, over time.")
    burst: int | None = Field(
        None, ge=1, le=1_000_000, description="Requests at once before the rate counts."
    )
    concurrency: int | None = Field(None, ge=1, le=1_000_000, description="Requests at the same time.")
    expires_in_s: float | None = Field(None, gt=0, le=100 * _YEAR_S)

    @field_validator("functions")
    @classmethod
    def _names(cls, functions: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in functions or ():
            if problem := name_problem(name):
                raise ValueError(problem)
        return functions

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if Scope.ADMIN in self.scopes and self.functions is not None:
            raise ValueError("a key that may make keys covers all functions")
        if self.burst is not None and self.rate_per_s is None:
            raise ValueError("burst says how far rate_per_s may be exceeded, which is not given")
        return self


class ApiKey(BaseModel):
    """A key as it is stored. Times are Unix timestamps in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[0-9a-f]{12}$")
    # One round of SHA-256 suffices: slow hashes make up for words that people choose, of which there are few enough to
    # try; here 256 random bits are hashed, and nobody tries those. And this is computed for every request.
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    name: str
    scopes: tuple[Scope, ...]
    functions: tuple[str, ...] | None = None
    rate_per_s: float | None = None
    burst: int | None = None
    concurrency: int | None = None
    created_s: float
    expires_s: float | None = None
    last_used_s: float | None = None

    def opens(self, token: str, now_s: float) -> bool:
        """Whether `token` is this key, and still counts. Takes equally long however much of it is right."""
        return hmac.compare_digest(self.digest, digest(token)) and not self.expired(now_s)

    def expired(self, now_s: float) -> bool:
        return self.expires_s is not None and now_s >= self.expires_s

    def shown(self) -> dict[str, Any]:
        """What is told of a key to those who may list keys."""
        fields = self.model_dump(mode="json", exclude={"digest", "created_s", "expires_s", "last_used_s"})
        times = {"created_at": self.created_s, "expires_at": self.expires_s, "last_used_at": self.last_used_s}
        return fields | {name: _date(at_s) for name, at_s in times.items()}


def mint(new: NewKey, now_s: float) -> tuple[ApiKey, str]:
    """A key, and its token: what its owner sends, shown once and never stored."""
    key_id = secrets.token_hex(6)
    token = f"pf_{key_id}_{secrets.token_hex(32)}"
    fields = new.model_dump(exclude={"expires_in_s"})
    expires_s = None if new.expires_in_s is None else now_s + new.expires_in_s
    key = ApiKey(id=key_id, digest=digest(token), created_s=now_s, expires_s=expires_s, **fields)
    return key, token


def key_id_of(token: str) -> str | None:
    """The id in a token; None if it is not of a token's form."""
    match = _TOKEN.fullmatch(token)
    return match[1] if match is not None else None


def digest(token: str) -> str:
    # Bytes of a header that are no UTF-8 arrive as halves of surrogate pairs.
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def spend_the_time(token: str) -> None:
    """For a token whose id nobody has: what a known one would have cost."""
    hmac.compare_digest(_NOBODY, digest(token))


def parse_new_key(body: bytes) -> NewKey:
    """The JSON of a request. Raises BadInput."""
    try:
        return NewKey.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(step) for step in problem["loc"]) or "body"
        raise BadInput(
            f"The key cannot be made: {where}: {problem['msg']}.",
            remedy='Send for example {"name": "shop", "scopes": ["invoke"], "functions": ["greeter"]}.',
        ) from None


def _date(at_s: float | None) -> str | None:
    return None if at_s is None else datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")
