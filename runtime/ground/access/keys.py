"""Defines API keys: the permissions of callers who send a key's token, and the stored form of a key."""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any, Self

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from ....errors import BadInput, Forbidden, UnknownFunction
from ....foreign_json import first_errors
from ..settings.function_settings import FunctionName
from ..settings.validation import YEAR_S
from .aws_signature import signing_digest
from .deploy_policy import DeployPolicy, StoredPolicy

TOKEN = re.compile(r"pf_([0-9a-f]{12})_[0-9a-f]{64}")
"""Matches a token. Its only group is the id of the token's key."""
ALL = "*"
"""In place of an owner, this means all owners. No API key has this id."""
_ISSUER = re.compile(r"https://[^\s?#]+|http://(127\.0\.0\.1|localhost)(:[0-9]{1,5})?(/[^\s?#]*)?")


class Scope(enum.StrEnum):
    """A right that a key gives. DEPLOY includes READ. READ allows requests that change nothing, and ADMIN allows
    everything.
    """

    INVOKE = "invoke"
    READ = "read"
    DEPLOY = "deploy"
    ADMIN = "admin"


# For each required scope, the scopes that grant it. A caller must have at least one of these scopes.
_ALLOWING = {scope: frozenset({scope, Scope.ADMIN}) for scope in Scope}
_ALLOWING[Scope.READ] |= {Scope.DEPLOY}

NO_ENGINE = (
    "With this key, only code in containers could be deployed, and this gateway has no container engine."
)
NO_ENGINE_REMEDY = (
    "Install docker or podman. Or make a key for code that you trust as much as the gateway: --trusted, or the policy"
    ' {"kind": "trusted"}.'
)
NO_CHANGES = "This gateway serves one function alone: without an API key it can only be called."
NO_CHANGES_REMEDY = (
    "Start a new image, or make a key where it runs: pilotflame keys create NAME --scope admin --state-dir FOLDER."
    " It has printed the folder at its start."
)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, and the sender's permissions."""

    owner: str = ""
    """The id of the caller's API key, and after a colon the owner that a token names; "" for a caller who needed no key."""
    scopes: frozenset[Scope] = frozenset(Scope)
    functions: frozenset[str] | None = None
    """The names of the only functions that the caller may use. None means all."""
    name: str = ""
    """The name of the caller's API key; "" for a caller who needed no key."""
    expires_s: float | None = None
    """When the API key expires, in Unix seconds."""
    confined: bool = False
    """True if only code in containers may be deployed with the API key. Then the caller may change only functions of the same owner."""

    @property
    def administers(self) -> bool:
        return Scope.ADMIN in self.scopes

    @property
    def urgent(self) -> bool:
        """True if the caller may choose a priority above the default, which can starve all other callers."""
        return not self.owner or self.administers

    def allows(self, function: str) -> bool:
        """Return True if the caller may use this function and may know that it exists."""
        return self.functions is None or function in self.functions

    def has(self, scope: Scope) -> bool:
        return bool(self.scopes & _ALLOWING[scope])

    def check(self, function: str) -> None:
        """Raise UnknownFunction, as for a missing function, if the caller may not know that this function exists."""
        if not self.allows(function):
            raise UnknownFunction.named(function)

    def check_scope(self, scope: Scope) -> None:
        """Raise Forbidden if the caller has neither `scope` nor a scope that includes it."""
        if not self.has(scope):
            if not self.owner:
                raise Forbidden(NO_CHANGES, remedy=NO_CHANGES_REMEDY)
            message = f"This API key lacks the scope {scope.value!r}."
            raise Forbidden(message, remedy="Ask the key's creator for one that has it.")

    def check_deploy(self, function: str) -> None:
        """Raise Forbidden if the caller may not deploy under this name, even if no function has the name."""
        self.check_scope(Scope.DEPLOY)
        if not self.allows(function):
            remedy = "Deploy it under a name that the key covers (--name), or with another key."
            raise Forbidden(f"This API key does not cover a function named {function!r}.", remedy=remedy)


ANYBODY = Caller()
"""The caller of a request that needs no API key. This caller has all rights."""


class TokenIssuer(BaseModel, frozen=True, extra="forbid"):
    """An OpenID Connect issuer whose tokens act as an API key."""

    url: str = Field(
        max_length=500,
        description="The claim iss of its tokens; its keys are found below it. https://, or http:// on loopback.",
    )
    audience: str = Field(min_length=1, max_length=500, description="A value that the claim aud must have.")
    subject: str = Field(
        min_length=1,
        max_length=500,
        description="What the claim sub must be; * stands for any characters.",
    )
    owner_claim: str | None = Field(
        None,
        min_length=1,
        max_length=100,
        description="A claim that names the owner of jobs: tokens with another value do not see them. By default one owner.",
    )

    @field_validator("url")
    @classmethod
    def _safe(cls, url: str) -> str:
        if not _ISSUER.fullmatch(url):
            raise ValueError("use an https:// address without a query, or http:// on 127.0.0.1 or localhost")
        return url


class StoredIssuer(TokenIssuer, extra="allow"):
    """The issuer of a stored key. If a newer pilotflame has given it conditions that this one does not know, no token of it is accepted."""


class KeyFields(BaseModel, frozen=True, extra="forbid"):
    """The fields of a key that its creator chooses."""

    name: str = Field(pattern=r"^[\x20-\x7e]{1,64}$", description="For people: who uses the key.")
    scopes: tuple[Scope, ...] = Field((Scope.INVOKE,), min_length=1)
    functions: tuple[FunctionName, ...] | None = Field(
        None, max_length=1000, description="The only functions it covers; null: all."
    )
    rate_per_s: float | None = Field(None, gt=0, le=1e6, description="Requests a second, over time.")
    burst: int | None = Field(None, ge=1, le=1_000_000, description="Requests at once above the rate.")
    concurrency: int | None = Field(None, ge=1, le=1_000_000, description="Requests at the same time.")
    model_tokens_per_min: int | None = Field(
        None,
        ge=1,
        le=1_000_000_000,
        description="Tokens of language models a minute, read and made. The key waits while it has used more.",
    )
    max_workers: int | None = Field(
        None, ge=1, le=1_000_000, description="Workers of all functions that are deployed with it."
    )
    policy: DeployPolicy | None = Field(
        None,
        description="The limits of deploys with it. A new key with the scope deploy allows only code in containers by default."
        " null: no limits.",
    )
    issuer: TokenIssuer | None = Field(
        None,
        description="Tokens of this issuer act as the key, which has no secret of its own. null: a key with a secret.",
    )


class NewKey(KeyFields, strict=True):
    """A request for a key."""

    expires_in_s: float | None = Field(None, gt=0, le=100 * YEAR_S)
    aws: bool = Field(
        False,
        description="Whether clients of AWS may sign requests to Lambda's routes with it. Then what the gateway stores of the"
        " key is enough to sign such requests.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if Scope.ADMIN in self.scopes and self.functions is not None:
            raise ValueError("a key with the scope admin covers all functions")
        if self.max_workers is not None and not {Scope.DEPLOY, Scope.ADMIN} & set(self.scopes):
            raise ValueError("max_workers needs the scope deploy: it limits what the key deploys")
        if self.policy is not None and Scope.DEPLOY not in self.scopes:
            raise ValueError("policy needs the scope deploy: it limits what the key deploys")
        if self.policy is not None and Scope.ADMIN in self.scopes:
            raise ValueError(
                "a key with the scope admin may deploy everything: it could make itself another key"
            )
        if self.issuer is not None and self.aws:
            raise ValueError("a key of an issuer has no secret that could sign requests")
        if (
            self.issuer is not None
            and self.issuer.owner_claim is not None
            and {Scope.DEPLOY, Scope.ADMIN} & set(self.scopes)
        ):
            raise ValueError("owner_claim is for keys that only call: a key deploys as one owner")
        if self.burst is not None and self.rate_per_s is None:
            raise ValueError("burst needs rate_per_s")
        return self

    @property
    def granted(self) -> DeployPolicy | None:
        """The policy of the new key. A key that may deploy has by default the policy for code that is not trusted. None
        if the key has no policy.
        """
        if self.policy is None and Scope.DEPLOY in self.scopes and Scope.ADMIN not in self.scopes:
            return DeployPolicy()
        return self.policy


class ApiKey(KeyFields, extra="allow"):
    """The stored form of a key. Times are Unix timestamps in seconds.

    Gateways of several versions may read and write it. A member that a newer version has given the key itself is ignored and kept. A new
    condition that must never be ignored belongs in the policy or the issuer.
    """

    policy: StoredPolicy | None = None
    issuer: StoredIssuer | None = None
    id: str = Field(pattern=r"^[0-9a-f]{12}$")
    # SHA-256 of the token, computed for every request. A slow hash would protect passwords, which can be
    # guessed. A token has 256 random bits and cannot be guessed.
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    # A digest with which the gateway verifies AWS signatures that were made with the token's secret part. The digest
    # does not reveal the secret, but with it, requests to the routes of AWS Lambda can be signed. None for keys that
    # were made without `aws`, or before this field existed.
    signing_digest: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    created_s: float
    expires_s: float | None = None
    last_used_s: float | None = None

    def opens(self, token: str, now_s: float) -> bool:
        """Return True if `token` belongs to this key and the key has not expired. Takes constant time."""
        return hmac.compare_digest(self.digest, _digest(token)) and not self.expired(now_s)

    def expired(self, now_s: float) -> bool:
        return self.expires_s is not None and now_s >= self.expires_s

    @property
    def container_only(self) -> bool:
        """True if only code in containers may be deployed with this key."""
        return self.policy is not None and self.policy.kind == "container"

    def shown(self) -> dict[str, Any]:
        """Return the key as JSON, without its digests."""
        hidden = {
            "digest",
            "signing_digest",
            "created_s",
            "expires_s",
            "last_used_s",
            *(self.model_extra or ()),
        }
        fields = self.model_dump(mode="json", exclude=hidden)
        fields["aws"] = self.signing_digest is not None
        times = {"created_at": self.created_s, "expires_at": self.expires_s, "last_used_at": self.last_used_s}
        return fields | {name: _date(at_s) for name, at_s in times.items()}


NOBODY = ApiKey(name="nobody", id="0" * 12, digest=hashlib.sha256(b"").hexdigest(), created_s=0.0)
"""A key that no token opens. The keyring compares tokens with unknown ids with this key.

Without this comparison, a token with an unknown id would be refused sooner than a wrong token with a known id, and the
time would show which ids exist.
"""


def mint(new: NewKey, now_s: float) -> tuple[ApiKey, str]:
    """Return a new key and its token, which the key does not contain. The token is "" for a key of an issuer."""
    key_id = secrets.token_hex(6)
    secret = secrets.token_hex(32)
    token = f"pf_{key_id}_{secret}"
    expires_s = None if new.expires_in_s is None else now_s + new.expires_in_s
    digests = {"digest": _digest(token), "signing_digest": signing_digest(secret) if new.aws else None}
    policy = None if new.granted is None else new.granted.model_dump()
    fields = new.model_dump(exclude={"expires_in_s", "policy", "aws"}) | {"policy": policy} | digests
    # Do not return the random token of a key of an issuer, so that no request can have it.
    return ApiKey(id=key_id, created_s=now_s, expires_s=expires_s, **fields), "" if new.issuer else token


def check_engine(new: NewKey, engine: str | None) -> None:
    """Raise BadInput if only code in containers may be deployed with the key, and there is no container engine."""
    if new.granted is not None and new.granted.kind == "container" and engine is None:
        raise BadInput(NO_ENGINE, remedy=NO_ENGINE_REMEDY)


def check_first(scopes: Collection[str]) -> None:
    """Raise BadInput if a key with these scopes may not be a gateway's first key: only an admin key can make another key
    over HTTP.
    """
    if Scope.ADMIN not in scopes:
        remedy = "Make it first: pilotflame keys create NAME --scope admin"
        raise BadInput(
            "The gateway has no API key, and its first key must have the scope admin.", remedy=remedy
        )


def check_issuer(new: NewKey) -> None:
    """Raise BadInput if the package that verifies tokens of issuers is missing."""
    if new.issuer is not None and find_spec("joserfc") is None:
        remedy = "pip install 'pilotflame[oidc]', for the gateway."
        raise BadInput("Tokens of issuers need the package joserfc.", remedy=remedy)


def parse_new_key(body: bytes) -> NewKey:
    """Return the request for a key that `body` holds as JSON. Raise BadInput if it is not valid."""
    try:
        return NewKey.model_validate_json(body)
    except ValidationError as error:
        problem = first_errors(error, 1)[0]
        where = ".".join(map(str, problem["loc"])) or "body"
        remedy = 'Send for example {"name": "shop", "scopes": ["invoke"], "functions": ["greeter"]}.'
        raise BadInput(f"The key cannot be made: {where}: {problem['msg']}.", remedy=remedy) from None


def _digest(token: str) -> str:
    # Header bytes that are not UTF-8 were decoded as lone surrogates. This turns them back into bytes.
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def _date(at_s: float | None) -> str | None:
    return None if at_s is None else datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")
