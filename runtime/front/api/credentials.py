"""Serves the routes that create, list and revoke API keys, and the routes that set, list and unset secrets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from functools import partial

from aiohttp import web
from pydantic import BaseModel, Field

from ....errors import UnknownFunction, UnknownSecret
from ...ground.access.keyring import Keyring
from ...ground.access.keys import (
    KeyFields,
    NewKey,
    Scope,
    check_engine,
    check_first,
    check_issuer,
    parse_new_key,
)
from ...ground.access.secrets import MAX_VALUE_BYTES, Secrets
from ...node.functions.rollouts import Rollouts
from ..http.audit import note
from ..http.endless_answers import EndlessAnswers
from ..http.requests import load_json, read_body, validate
from ..http.responses import Timestamp, json_response
from ..http.routes import Route

# A JSON string needs up to six bytes for one byte of a secret's value. The rest of the body gets 1024 bytes.
MAX_BODY_BYTES = 6 * MAX_VALUE_BYTES + 1024


class SecretValue(BaseModel, frozen=True, extra="forbid", strict=True):
    """The value of a secret."""

    value: str = Field(repr=False)


class ShownKey(KeyFields, title="ApiKey", extra="ignore", json_schema_serialization_defaults_required=True):
    """A key as it is listed."""

    id: str
    created_at: Timestamp
    expires_at: Timestamp | None
    last_used_at: Timestamp | None
    aws: bool


class CreatedKey(ShownKey, title="CreatedKey"):
    """A new key with its token, which is shown only here. A key of an issuer has no token: it is empty."""

    key: str


@dataclass(frozen=True, slots=True)
class CredentialsApi:
    """The routes below /v1/keys, and the routes of each function's secrets."""

    keyring: Keyring
    secrets: Secrets
    rollouts: Rollouts
    endless: EndlessAnswers
    engine: str | None
    """The URL of the container engine, if there is one."""

    def routes(self) -> list[Route]:
        row = partial(Route, errors=(400, 404, 408, 413, 422, 503))
        # A caller who may deploy a function may also set its secrets.
        admin, deploy = Scope.ADMIN, Scope.DEPLOY
        keys, secrets = "/v1/keys", "/v1/functions/{function}/secrets"
        one = f"{secrets}/{{key}}"
        names, revoked = {"function": str, "secrets": list[str]}, {"revoked": str, "name": str}
        put = {"function": str, "secret": str, "replaced": bool, "deployed": bool}
        return [
            row("POST", keys, self.create_key, admin, "Create an API key.", CreatedKey, 201, body=NewKey),
            row("GET", keys, self.list_keys, admin, "List the API keys.", {"keys": list[ShownKey]}),
            row("DELETE", "/v1/keys/{id}", self.revoke_key, admin, "Revoke an API key.", revoked),
            row("GET", secrets, self.list_secrets, deploy, "List the names of a function's secrets.", names),
            row(
                "PUT",
                one,
                self.set_secret,
                deploy,
                "Set a secret; the function's processes are replaced.",
                put,
                body=SecretValue,
            ),
            row("DELETE", one, self.unset_secret, deploy, "Unset a secret.", {"function": str, "unset": str}),
        ]

    async def create_key(self, request: web.Request) -> web.StreamResponse:
        new = parse_new_key(await read_body(request, MAX_BODY_BYTES, remedy=""))
        check_engine(new, self.engine)
        check_issuer(new)
        open_before = not self.keyring.exists
        # Check the first key only over TCP. The owner of the control socket can create another key at any time, so
        # their first key needs no scope `admin`.
        if open_before and request.remote:
            check_first(new.scopes)
        key, token = await asyncio.to_thread(self.keyring.create, new, time.time())
        if open_before:
            # From now on, callers need a key. End the answers to callers without a key.
            self.endless.end_of_key("")
        note(request, id=key.id, name=key.name, scopes=" ".join(key.scopes))
        return json_response({**key.shown(), "key": token}, status=201, no_store=True)

    async def list_keys(self, _request: web.Request) -> web.StreamResponse:
        return json_response({"keys": [key.shown() for key in self.keyring.all()]}, no_store=True)

    async def revoke_key(self, request: web.Request) -> web.StreamResponse:
        key = await asyncio.to_thread(self.keyring.revoke, request.match_info["id"])
        self.endless.end_of_key(key.id)
        note(request, name=key.name)
        return json_response({"revoked": key.id, "name": key.name})

    async def list_secrets(self, request: web.Request) -> web.StreamResponse:
        function = request.match_info["function"]
        return json_response({"function": function, "secrets": sorted(self.secrets.of(function))})

    async def set_secret(self, request: web.Request) -> web.StreamResponse:
        function, key = request.match_info["function"], request.match_info["key"]
        body = await read_body(request, MAX_BODY_BYTES, remedy="")
        sent = validate(SecretValue, load_json(body), 'Send {"value": "…"}, UTF-8.')
        replaced = await self._set(function, key, sent.value)
        self.rollouts.renew(function)
        deployed = self.rollouts.functions.find(function) is not None
        result = {"function": function, "secret": key, "replaced": replaced, "deployed": deployed}
        return json_response(result, no_store=True)

    async def _set(self, function: str, key: str, value: str) -> bool:
        """Set a secret, and return True if it replaced a value. Raise UnknownFunction if another gateway has deleted
        the function or given its name to another owner. Without this check, the next function of this name
        would get the secret.
        """
        live, shared = self.rollouts.functions.find(function), self.rollouts.functions.shared
        record = None if live is None else live.record
        if shared is not None:
            await shared.check_served(function, record)
        replaced = await asyncio.to_thread(self.secrets.set, function, key, value)
        if shared is not None:
            try:
                # Check again after the secret was set. A deletion by another gateway first changes the index and then
                # removes the secrets, perhaps before this secret was set.
                await shared.check_served(function, record)
            except UnknownFunction:
                with contextlib.suppress(UnknownSecret):
                    await asyncio.to_thread(self.secrets.unset, function, key)
                raise
        return replaced

    async def unset_secret(self, request: web.Request) -> web.StreamResponse:
        function, key = request.match_info["function"], request.match_info["key"]
        await asyncio.to_thread(self.secrets.unset, function, key)
        self.rollouts.renew(function)
        return json_response({"function": function, "unset": key})
