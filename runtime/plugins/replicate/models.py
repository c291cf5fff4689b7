"""Shows functions as Replicate's models, versions and deployments.

A model, its only version and its deployment all have the function's name. Any name of an owner is accepted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from aiohttp import web
from typing_extensions import TypedDict

from ....errors import UnknownFunction
from ...front.api.backend import Backend
from ...front.http.requests import caller_of, owner_of
from ...front.http.responses import Timestamp, json_response
from ...front.http.routes import Parameter, Route
from ...ground.access.keys import Scope
from ...node.functions.live import Live
from ...node.functions.status import FunctionStatus
from ..predictions.cog_version import COG_VERSION
from ..predictions.predictor_schema import predictor_document
from .problem import ERRORS

PAGE = 100
CURSOR = Parameter("cursor", "As in `next` or `previous` of another page.")
OWNER = "pilotflame"
"""The owner that is shown if the caller has not named an owner."""


class Version(TypedDict):
    """A model's version: the live revision of a function."""

    id: str
    created_at: Timestamp
    cog_version: str
    openapi_schema: dict[str, Any]


class Model(TypedDict):
    """A function as a model."""

    url: str
    owner: str
    name: str
    description: str | None
    visibility: str
    github_url: str | None
    paper_url: str | None
    license_url: str | None
    run_count: int
    cover_image_url: str | None
    default_example: None
    latest_version: Version


class Release(TypedDict):
    """The model and the configuration that a deployment runs."""

    number: int
    model: str
    version: str
    created_at: Timestamp
    created_by: None
    configuration: dict[str, str | int]


class ModelDeployment(TypedDict):
    """A function as a deployment."""

    owner: str
    name: str
    current_release: Release


def page_of(kind: Any) -> dict[str, Any]:
    """Return the type of a page of a list."""
    return {"previous": str | None, "next": str | None, "results": list[kind]}


class ModelsApi:
    """The routes of models, their versions and deployments."""

    def __init__(self, backend: Backend, origin_of: Callable[[web.Request], str]) -> None:
        """`origin_of` returns the URL below which a caller finds the paths of `routes`."""
        self._backend, self._origin_of = backend, origin_of

    def routes(self) -> list[Route]:
        model, versions = "/v1/models/{owner}/{name}", "/v1/models/{owner}/{name}/versions"
        deployment, missing = "/v1/deployments/{owner}/{name}", {"errors": (404, 503)} | ERRORS

        paged = {"parameters": (CURSOR,)}

        def row(path: str, handler: Any, summary: str, response: Any, **more: Any) -> Route:
            return Route("GET", path, handler, Scope.INVOKE, summary, response, **missing, **more)

        return [
            row("/v1/models", self.models, "List models.", page_of(Model), **paged),
            row(model, self.model, "Show a model.", Model),
            row(versions, self.versions, "List a model's versions.", page_of(Version)),
            row(f"{versions}/{{version}}", self.version, "Show a version of a model.", Version),
            row("/v1/deployments", self.deployments, "List deployments.", page_of(ModelDeployment), **paged),
            row(deployment, self.deployment, "Show a deployment.", ModelDeployment),
        ]

    def live(self, request: web.Request, reference: str) -> Live:
        """Return the function of a reference such as "name", "owner/name" or "owner/name:version".

        Raise UnknownFunction if there is no such function, or if the caller may not see it.
        """
        name = reference.rpartition("/")[2].partition(":")[0]
        caller_of(request).check(name)
        return self._backend.functions.get(name)

    async def models(self, request: web.Request) -> web.StreamResponse:
        names, links = self._page(request)
        found = [
            await self._model(request, self.live(request, name).status().without_schemas(), OWNER)
            for name in names
        ]
        return json_response(links | {"results": found})

    async def model(self, request: web.Request) -> web.StreamResponse:
        status = self._named(request).status()
        return json_response(await self._model(request, status, request.match_info["owner"]))

    async def versions(self, request: web.Request) -> web.StreamResponse:
        versions = [_version(self._named(request).status())]
        return json_response({"previous": None, "next": None, "results": versions})

    async def version(self, request: web.Request) -> web.StreamResponse:
        live, version = self._named(request), request.match_info["version"]
        if version not in (live.record.function, live.record.revision):
            raise UnknownFunction.named(version)
        return json_response(_version(live.status()))

    async def deployments(self, request: web.Request) -> web.StreamResponse:
        names, links = self._page(request)
        found = [_deployment(self.live(request, name), OWNER) for name in names]
        return json_response(links | {"results": found})

    async def deployment(self, request: web.Request) -> web.StreamResponse:
        return json_response(_deployment(self._named(request), request.match_info["owner"]))

    def _page(self, request: web.Request) -> tuple[list[str], dict[str, str | None]]:
        """Return the names of the functions on a page, and the links to the previous and the next page."""
        names, cursor = sorted(self._backend.names(request)), request.query.get(CURSOR.name, "")
        start = bisect_right(names, cursor)
        end, base = start + PAGE, f"{self._backend.origins.of(request)}{request.path}"
        before = f"{base}?cursor={names[start - PAGE - 1]}" if start > PAGE else base
        links = {
            "previous": before if start else None,
            "next": f"{base}?cursor={names[end - 1]}" if end < len(names) else None,
        }
        return names[start:end], links

    def _named(self, request: web.Request) -> Live:
        return self.live(request, request.match_info["name"])

    async def _model(self, request: web.Request, status: FunctionStatus, owner: str) -> Model:
        name = status.name
        counts = await self._backend.jobs.store.counts(name, owner_of(request))
        return Model(
            url=f"{self._origin_of(request)}/v1/models/{owner}/{name}", owner=owner, name=name, description=None,
            visibility="private", github_url=None, paper_url=None, license_url=None, cover_image_url=None,
            run_count=counts.completed + counts.failed + counts.cancelled, default_example=None,
            latest_version=_version(status),
        )  # fmt: skip


def _version(status: FunctionStatus) -> Version:
    created, schema = status.created_at.isoformat(), predictor_document(status)
    return Version(id=status.name, created_at=created, cog_version=COG_VERSION, openapi_schema=schema)


def hardware_of(live: Live) -> str:
    """Return the name of the hardware that a worker of the function runs on."""
    gpus = live.record.settings.resources.gpus
    return "cpu" if not gpus else "gpu" if gpus == 1 else f"gpu-{gpus}x"


def _deployment(live: Live, owner: str) -> ModelDeployment:
    status = live.status()
    scale = status.settings.scale
    release = Release(
        number=live.record.number, model=f"{owner}/{status.name}", version=status.name, created_at=status.created_at.isoformat(),
        created_by=None,
        configuration={"hardware": hardware_of(live), "min_instances": scale.min, "max_instances": scale.max},
    )  # fmt: skip
    return ModelDeployment(owner=owner, name=status.name, current_release=release)
