"""Serves the routes that create, list and revoke API keys, and those that set, list and unset secrets."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, with_config
from typing_extensions import TypedDict

from ..access.keyring import Keyring
from ..access.keys import NewKey, Scope, parse_new_key
from ..access.secrets import MAX_VALUE_BYTES, Secrets
from ..functions.registry import Functions
from .requests import load_json, read_body, validate
from .responses import Handler, Timestamp, json_response
from .routes import Route

# A JSON string needs up to six bytes for one byte of a secret's value. The rest of the body gets 1024 bytes.
MAX_BODY_BYTES = 6 * MAX_VALUE_BYTES + 1024
BODY_TIMEOUT_S = 30.0
ERRORS = (400, 404, 408, 413, 422, 503)


class SecretValue(BaseModel):
    """The value of a secret."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    value: str = Field(repr=False)


@with_config(title="ApiKey")
class ShownKey(TypedDict):
    """A key as it is listed."""

    id: str
    name: str
    scopes: list[Scope]
    functions: list[str] | None
    rate_per_s: float | None
    burst: int | None
    concurrency: int | None
    created_at: Timestamp
    expires_at: Timestamp | None
    last_used_at: Timestamp | None


class CreatedKey(ShownKey):
    """A new key with its token, which is shown only here."""

    key: str


@dataclass(frozen=True, slots=True)
class AccessControl:
    """The routes below /v1/keys, and those of each function's secrets."""

    keyring: Keyring
    secrets: Secrets
    functions: Functions

    def routes(self) -> list[Route]:
        def row(
            method: str, path: str, handler: Handler, summary: str, response: Any, **fields: Any
        ) -> Route:
            # A caller who may deploy a function may also set its secrets.
            scope = Scope.ADMIN if path.startswith("/v1/keys") else Scope.DEPLOY
            return Route(method, path, handler, scope, summary, response, errors=ERRORS, **fields)

        keys, secrets = "/v1/keys", "/v1/functions/{function}/secrets"
        secret = f"{secrets}/{{key}}"
        names, revoked = {"function": str, "secrets": list[str]}, {"revoked": str, "name": str}
        was_set = {"function": str, "secret": str, "replaced": bool, "deployed": bool}
        was_unset = {"function": str, "unset": str}
        return [
            row("POST", keys, self.create_key, "Create an API key.", CreatedKey, status=201, body=NewKey),
            row("GET", keys, self.list_keys, "List the API keys.", {"keys": list[ShownKey]}),
            row("DELETE", "/v1/keys/{id}", self.revoke_key, "Revoke an API key.", revoked),
            row("GET", secrets, self.list_secrets, "List the names of a function's secrets.", names),
            row("PUT", secret, self.set_secret, "Set a secret for new workers.", was_set, body=SecretValue),
            row("DELETE", secret, self.unset_secret, "Unset a secret.", was_unset),
        ]

    async def create_key(self, request: web.Request) -> web.StreamResponse:
        new = parse_new_key(await read_body(request, MAX_BODY_BYTES, BODY_TIMEOUT_S, remedy=""))
        key, token = await asyncio.to_thread(self.keyring.create, new, time.time())
        return json_response({**key.shown(), "key": token}, status=201, no_store=True)

    async def list_keys(self, _request: web.Request) -> web.StreamResponse:
        return json_response({"keys": [key.shown() for key in self.keyring.all()]}, no_store=True)

    async def revoke_key(self, request: web.Request) -> web.StreamResponse:
        key = await asyncio.to_thread(self.keyring.revoke, request.match_info["id"])
        return json_response({"revoked": key.id, "name": key.name})

    async def list_secrets(self, request: web.Request) -> web.StreamResponse:
        function = request.match_info["function"]
        return json_response({"function": function, "secrets": sorted(self.secrets.of(function))})

    async def set_secret(self, request: web.Request) -> web.StreamResponse:
        function, key = request.match_info["function"], request.match_info["key"]
        body = await read_body(request, MAX_BODY_BYTES, BODY_TIMEOUT_S, remedy="")
        sent = validate(SecretValue, load_json(body), 'Send {"value": "…"}, UTF-8.')
        replaced = await asyncio.to_thread(self.secrets.set, function, key, sent.value)
        deployed = any(live.record.function == function for live in self.functions.all())
        result = {"function": function, "secret": key, "replaced": replaced, "deployed": deployed}
        return json_response(result, no_store=True)

    async def unset_secret(self, request: web.Request) -> web.StreamResponse:
        function, key = request.match_info["function"], request.match_info["key"]
        await asyncio.to_thread(self.secrets.unset, function, key)
        return json_response({"function": function, "unset": key})
