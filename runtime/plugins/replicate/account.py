"""Serves Replicate's routes about the account, its hardware, its webhook secret and its trainings."""

from __future__ import annotations

from typing import Any, Literal, NoReturn

from aiohttp import hdrs, web
from typing_extensions import TypedDict

from ....errors import Forbidden, UnknownRoute
from ...front.api.backend import Backend
from ...front.http.requests import caller_of
from ...front.http.responses import json_response
from ...front.http.routes import Parameter, Route
from ...ground.access.keys import Scope
from .models import OWNER, hardware_of
from .problem import ERRORS, Problem

TRAININGS = (
    ("GET", "/v1/trainings"),
    ("GET", "/v1/trainings/{id}"),
    ("POST", "/v1/trainings/{id}/cancel"),
    ("POST", "/v1/models/{owner}/{name}/versions/{version}/trainings"),
    ("POST", "/trainings"),
    ("PUT", "/trainings/{id}"),
)
"""The routes of trainings, first Replicate's and then Cog's."""
_PATH = {
    name: Parameter(name, place="path", type="string", pattern="^[A-Za-z0-9._-]+$")
    for name in ("id", "owner", "name", "version")
}


class KeyAccount(TypedDict):
    """The caller. `name` is the id of the API key, or the username if the caller has no key."""

    type: Literal["user"]
    username: str
    name: str
    github_url: None


class Hardware(TypedDict):
    """A kind of hardware on which functions run."""

    name: str
    sku: str


class WebhookSecret(TypedDict):
    """The secret that verifies the webhooks of all predictions that the caller's API key makes."""

    key: str


class AccountApi:
    """The routes of the account."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def routes(self) -> list[Route]:
        def row(path: str, handler: Any, summary: str, response: Any) -> Route:
            return Route("GET", path, handler, Scope.INVOKE, summary, response, errors=(), **ERRORS)

        secret = "Show the secret that verifies webhooks."  # noqa: S105
        trainings = [
            Route(
                method, path, self.train, Scope.INVOKE, "Trainings do not exist.", Problem, 404, errors=(),
                parameters=tuple(_PATH[name] for name in _PATH if f"{{{name}}}" in path), **ERRORS,
            )
            for method, path in TRAININGS
        ]  # fmt: skip
        return [
            row("/v1/account", self.account, "Show the account.", KeyAccount),
            row("/v1/hardware", self.hardware, "List what functions run on.", list[Hardware]),
            row("/v1/webhooks/default/secret", self.secret, secret, WebhookSecret),
            *trainings,
        ]

    async def account(self, request: web.Request) -> web.StreamResponse:
        name = caller_of(request).owner or OWNER
        return json_response(KeyAccount(type="user", username=OWNER, name=name, github_url=None))

    async def hardware(self, request: web.Request) -> web.StreamResponse:
        """List the hardware of all functions that the caller may see. The list always has the CPU."""
        names, functions = self._backend.names(request), self._backend.functions
        skus = {"cpu", *(hardware_of(functions.get(name)) for name in names)}
        return json_response([Hardware(name=sku.upper(), sku=sku) for sku in sorted(skus)])

    async def secret(self, request: web.Request) -> web.StreamResponse:
        if hdrs.ORIGIN in request.headers:
            message = "A web page does not get the secret of webhooks."
            raise Forbidden(message, remedy="Ask for it from the server that receives them.")
        found = WebhookSecret(key=self._backend.jobs.key.of_owner(caller_of(request).owner).secret)
        return json_response(found, no_store=True)

    async def train(self, _request: web.Request) -> NoReturn:
        remedy = "Train elsewhere, and deploy the weights as a snapshot."
        raise UnknownRoute("Trainings do not exist here: functions only predict.", remedy=remedy)
