"""The routes of TorchServe's management API: functions as models, and the number of their workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired

from aiohttp import web
from typing_extensions import TypedDict

from ....errors import BadInput, NotSupported, UnknownFunction
from ...front.api.backend import Backend
from ...front.http.requests import caller_of
from ...front.http.responses import json_response
from ...front.http.routes import Flag, Number, Parameter, Route
from ...ground.access.keys import Scope
from ...node.functions.live import Live
from .errors import ERRORS

MODEL = "/models/{function}"
ALL = "all"
PAGE = 100
LIMIT = Number("limit", "The most models of a page.", PAGE, minimum=1, maximum=1000)
NEXT = Parameter("next_page_token", "As in nextPageToken of another page.")
VERSION = Parameter("version", f"The number of the live revision, or {ALL}.", place="path")
MIN_WORKER = Number(
    "min_worker", "How many workers to start ahead of calls, for a minute. 0 ends warm-ups.", 1, maximum=1024
)
SYNCHRONOUS = Flag("synchronous", "Wait until the workers are ready.")
WAIT_S = 120.0
"""How long a synchronous request waits. It is the default of TorchServe's startup_timeout."""
SCALING = frozenset({"min_worker", "max_worker", "synchronous", "timeout"})


class ListedModel(TypedDict):
    """A function in the list."""

    modelName: str
    modelUrl: str


class ListedModels(TypedDict):
    """A page of functions."""

    models: list[ListedModel]
    nextPageToken: NotRequired[str]


class ListedWorker(TypedDict):
    """A process of a function. Only its state is known."""

    id: str
    status: str
    gpu: bool


class DescribedModel(TypedDict):
    """A function as a model."""

    modelName: str
    modelVersion: str
    modelUrl: str
    engine: str
    runtime: str
    minWorkers: int
    maxWorkers: int
    batchSize: int
    loadedAtStartup: bool
    workers: list[ListedWorker]
    jobQueueStatus: dict[str, int]


class ManagementApi:
    """The routes of models."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def routes(self) -> Sequence[Route]:
        call, known = Scope.INVOKE, {"errors": (400, 404, 503), **ERRORS}
        scale: dict[str, Any] = {
            "parameters": (MIN_WORKER, SYNCHRONOUS), "other_responses": {202: {"status": str}}, **known
        }  # fmt: skip
        models = Route("GET", "/models", self.models, call, "List the functions.", ListedModels, parameters=(LIMIT, NEXT), errors=(400,), **ERRORS)  # fmt: skip
        return [
            models,
            Route("GET", MODEL, self.describe, call, "Describe a function.", list[DescribedModel], **known),
            Route("GET", f"{MODEL}/{{version}}", self.describe, call, "Describe a function.", list[DescribedModel], parameters=(VERSION,), **known),
            Route("PUT", MODEL, self.scale, call, "Start workers ahead of calls.", {"status": str}, **scale),
            *(Route(*row, self.refuse, Scope.DEPLOY, "Not supported.", errors=(405,), **ERRORS) for row in (
                ("POST", "/models"), ("DELETE", MODEL), ("DELETE", f"{MODEL}/{{version}}"), ("PUT", f"{MODEL}/{{version}}/set-default"),
            )),
        ]  # fmt: skip

    async def models(self, request: web.Request) -> web.StreamResponse:
        token, limit = request.query.get(NEXT.name, ""), LIMIT.read(request)
        names = [name for name in sorted(self._backend.names(request)) if name > token]
        found: ListedModels = {
            "models": [ListedModel(modelName=name, modelUrl=name) for name in names[:limit]]
        }
        if len(names) > limit:
            found["nextPageToken"] = names[limit - 1]
        return json_response(found)

    async def describe(self, request: web.Request) -> web.StreamResponse:
        live, version = self._live(request), request.match_info.get("version", ALL)
        if version not in (ALL, str(live.record.number)):
            name = live.record.function
            raise UnknownFunction(f"Model version: {version[:64]} does not exist for model: {name}")
        return json_response([_described(live)])

    async def scale(self, request: web.Request) -> web.StreamResponse:
        """Start workers, and keep them for a minute, as a warm-up does."""
        live, (workers, waits) = self._live(request), (MIN_WORKER.read(request), _waits(request))
        name, most = live.record.function, live.record.settings.scale.max
        if unknown := sorted(set(request.query) - SCALING):
            raise BadInput(
                f"The parameter {unknown[0][:64]!r} does not exist.",
                remedy=f"One of {', '.join(sorted(SCALING))}.",
            )
        if request.query.get("max_worker", str(most)) != str(most):
            raise BadInput(
                "pilotflame does not support max_worker here.",
                remedy=f"It is {most}. Set scale.max and deploy.",
            )
        if request.query.get("timeout", "-1") != "-1":
            raise BadInput(
                "pilotflame does not support timeout: it ends no worker with calls.", remedy="Omit it."
            )
        if workers > most:
            raise BadInput(
                f"min_worker is {workers}, and {name} has at most {most} workers.",
                remedy="Raise scale.max and deploy.",
            )
        if (error := live.function.refusal()) is not None:
            raise error
        if not workers:
            self._backend.functions.check_owner(caller_of(request), name)
            live.workers.end_warm_ups()
        else:
            live.workers.warm(workers, "torchserve")
        if not waits:
            return json_response({"status": "Processing worker updates..."}, status=202)
        if workers:
            await live.workers.wait_ready(workers, WAIT_S)
        return json_response({"status": f"Workers scaled to {workers} for model: {name}"})

    async def refuse(self, request: web.Request) -> web.StreamResponse:
        action = {"POST": "the registration of models", "DELETE": "unregistering models"}.get(
            request.method, "set-default"
        )
        raise NotSupported(
            f"pilotflame does not support {action} here.",
            remedy="Use `pilotflame deploy`, `delete` and `rollback`.",
        )

    def _live(self, request: web.Request) -> Live:
        return self._backend.functions.get(request.match_info["function"])


def _waits(request: web.Request) -> bool:
    """Return the parameter `synchronous`, which TorchServe's clients write in any case of letters."""
    return request.query.get(SYNCHRONOUS.name, "false").lower() in ("true", "1")


def _described(live: Live) -> DescribedModel:
    status, scale = live.status(), live.record.settings.scale
    states = {
        "READY": status.workers.ready,
        "UNLOADING": status.workers.draining,
        "LOADING": status.workers.starting,
    }
    gpu = bool(live.record.settings.resources.gpus)
    states_of = [state for state, count in states.items() for _ in range(count)]
    return DescribedModel(
        modelName=status.name, modelVersion=str(live.record.number), modelUrl=status.name, engine="Torch", runtime="python",
        minWorkers=scale.min, maxWorkers=scale.max, batchSize=status.batch or 1, loadedAtStartup=False,
        workers=[ListedWorker(id=str(number), status=state, gpu=gpu) for number, state in enumerate(states_of)],
        jobQueueStatus={
            "remainingCapacity": max(0, live.record.settings.max_queue - status.queued), "pendingRequests": status.queued,
        },
    )  # fmt: skip
