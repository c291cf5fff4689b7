"""The control routes of access: keys are made, listed and revoked; secrets set, listed by name and unset."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...errors import BadInput, InputTooLarge
from ..access.keyring import Keyring
from ..access.keys import parse_new_key
from ..access.secrets import MAX_VALUE_BYTES, Secrets
from ..functions.registry import Functions
from .requests import read_body
from .responses import typed

# A value as JSON has at most six bytes for each of its own.
MAX_BODY_BYTES = 6 * MAX_VALUE_BYTES + 1024
BODY_TIMEOUT_S = 30.0
# Of answers with a key in them, and of lists that are old as soon as somebody changes one.
NOT_KEPT = {"Cache-Control": "no-store"}


class SecretValue(BaseModel):
    """The JSON that sets a secret."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    value: str = Field(repr=False)


class AccessControl:
    """Routes of keys and secrets."""

    def __init__(self, keyring: Keyring, vault: Secrets, functions: Functions) -> None:
        self._keyring = keyring
        self._vault = vault
        self._functions = functions

    def routes(self) -> list[web.RouteDef]:
        secrets = "/v1/functions/{function}/secrets"
        return [
            web.post("/v1/keys", typed(self.create_key)),
            web.get("/v1/keys", typed(self.list_keys)),
            web.delete("/v1/keys/{id}", typed(self.revoke_key)),
            web.get(secrets, typed(self.list_secrets)),
            web.put(f"{secrets}/{{key}}", typed(self.set_secret)),
            web.delete(f"{secrets}/{{key}}", typed(self.unset_secret)),
        ]

    async def create_key(self, request: web.Request) -> web.StreamResponse:
        new = parse_new_key(await _body(request))
        key, token = await asyncio.to_thread(self._keyring.create, new, time.time())
        return web.json_response({**key.shown(), "key": token}, status=201, headers=NOT_KEPT)

    async def list_keys(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"keys": [key.shown() for key in self._keyring.all()]}, headers=NOT_KEPT)

    async def revoke_key(self, request: web.Request) -> web.StreamResponse:
        key = await asyncio.to_thread(self._keyring.revoke, request.match_info["id"])
        return web.json_response({"revoked": key.id, "name": key.name})

    async def list_secrets(self, request: web.Request) -> web.StreamResponse:
        function = request.match_info["function"]
        return web.json_response({"function": function, "secrets": self._vault.names(function)})

    async def set_secret(self, request: web.Request) -> web.StreamResponse:
        function, key = request.match_info["function"], request.match_info["key"]
        value = _parse_value(await _body(request))
        replaced = await asyncio.to_thread(self._vault.set, function, key, value)
        deployed = any(live.record.function == function for live in self._functions.all())
        told = {"function": function, "secret": key, "replaced": replaced, "deployed": deployed}
        return web.json_response(told, headers=NOT_KEPT)

    async def unset_secret(self, request: web.Request) -> web.StreamResponse:
        function, key = request.match_info["function"], request.match_info["key"]
        await asyncio.to_thread(self._vault.unset, function, key)
        return web.json_response({"function": function, "unset": key})


async def _body(request: web.Request) -> bytes:
    try:
        return await read_body(request, MAX_BODY_BYTES, BODY_TIMEOUT_S)
    except InputTooLarge:
        raise InputTooLarge(f"The body is larger than {MAX_BODY_BYTES} bytes.") from None


def _parse_value(body: bytes) -> str:
    try:
        return SecretValue.model_validate_json(body).value
    except ValidationError:  # what was sent is not to be quoted
        raise BadInput("The body is not a secret's.", remedy='Send {"value": "…"}, UTF-8.') from None
