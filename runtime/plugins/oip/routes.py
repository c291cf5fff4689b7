"""The routes of the protocol: below /oip, and also without this prefix, as clients of Triton expect them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar
from urllib.parse import unquote

from aiohttp import web

from ....errors import BadInput, PilotflameError
from ....snapshot.extras import needs
from ...front.api.backend import Backend
from ...front.api.plugin import ApiPlugin, Entrance
from ...front.http.parsed_bodies import parsed
from ...front.http.requests import CALLS, Headers, caller_of, load_json, read_body, request_id_of
from ...front.http.responses import MAX_ON_LOOP_BYTES, json_response
from ...front.http.routes import Route
from ...ground.access.keys import Scope
from .errors import ERRORS, load_failure, oip_error_reply
from .infer_call import InferCall
from .infer_request import InferenceRequest, InferRequest, json_bytes
from .model import ServerMetadata, TensorModel, server_metadata
from .repository import Repository

MODEL = "/v2/models/{model}"
VERSION = f"{MODEL}/versions/{{version}}"
_INFER_ERRORS = (400, 404, 408, 413, 429, 500, 501, 503, 504)
_MAX_INDEX_BYTES = 64 << 10


class OipApi(ApiPlugin):
    """The routes of the protocol."""

    base: ClassVar = "/oip"
    always_bare: ClassVar = "/v2"
    unrouted: ClassVar = {"/v2/": oip_error_reply}
    plain_paths: ClassVar = ("/v2/models/", "/oip/v2/models/")

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._repository = Repository(backend.functions)

    def listening(self, entrance: Entrance) -> AbstractAsyncContextManager[None]:
        """Serve gRPC. Raise PackageMissing if grpcio is not installed."""
        with needs("The Open Inference Protocol over gRPC", "grpc"):
            # Imported only here, because the import takes long.
            from .grpc_server import GrpcServer  # noqa: PLC0415

        return GrpcServer(self.backend, self._repository, entrance).listening()

    def routes(self) -> Sequence[Route]:
        live = {"live": bool}
        found = [
            Route("GET", "/v2", self.server, None, "Describe the server.", ServerMetadata, public=True),
            Route("GET", "/v2/health/live", self.is_live, None, "Is the server up?", live, public=True, **ERRORS),
            Route(
                "GET", "/v2/health/ready", self.is_ready, None, "Does the server take requests?", {"ready": bool},
                public=True, **ERRORS,
            ),
            Route("GET", "/v2/models/stats", self.all_stats, Scope.INVOKE, "Show the counts of all models.", Any, **ERRORS),
            Route(
                "POST", "/v2/repository/index", self.index, Scope.INVOKE, "List the models.", list[dict[str, str]],
                body=dict[str, Any], body_required=False, reads=True, **ERRORS,
            ),
            *(
                Route(
                    "POST", f"/v2/repository/models/{{function}}/{verb}", handler, Scope.DEPLOY, summary,
                    body=dict[str, Any], body_required=False, errors=(400, 404, 413, 500, 503), **ERRORS,
                )
                for verb, handler, summary in (
                    ("load", self.load, "Let a paused function run again, and start a worker."),
                    ("unload", self.unload, "Pause a function: it refuses calls, and its workers end."),
                )
            ),
        ]  # fmt: skip
        for path in (MODEL, VERSION):
            found += [
                Route("GET", path, self.metadata, Scope.INVOKE, "Describe a model.", Any, **ERRORS),
                Route("GET", f"{path}/ready", self.model_ready, Scope.INVOKE, "Does a model take requests?", Any, **ERRORS),
                Route("GET", f"{path}/config", self.config, Scope.INVOKE, "Describe a model as Triton does.", Any, **ERRORS),
                Route("GET", f"{path}/stats", self.stats, Scope.INVOKE, "Show the counts of a model.", Any, **ERRORS),
                Route(
                    "POST", f"{path}/infer", self.infer, Scope.INVOKE, "Call a model.", Any, errors=_INFER_ERRORS,
                    body=InferenceRequest, **ERRORS,
                ),
            ]  # fmt: skip
        return found

    # -- the server

    async def server(self, _request: web.Request) -> web.StreamResponse:
        return json_response(server_metadata())

    async def is_live(self, _request: web.Request) -> web.StreamResponse:
        return json_response({"live": True})

    async def is_ready(self, _request: web.Request) -> web.StreamResponse:
        return json_response({"ready": True})

    # -- models

    async def metadata(self, request: web.Request) -> web.StreamResponse:
        return json_response(self._model(request).metadata(request.match_info["model"]))

    async def config(self, request: web.Request) -> web.StreamResponse:
        return json_response(self._model(request).config(request.match_info["model"]))

    async def model_ready(self, request: web.Request) -> web.StreamResponse:
        model = self._model(request)
        found = {"name": request.match_info["model"], "ready": model.ready}
        return json_response(found, status=200 if model.ready else 400)

    async def stats(self, request: web.Request) -> web.StreamResponse:
        found = self._repository.statistics.of(self._model(request), request.match_info["model"])
        return json_response({"model_stats": [found]})

    async def all_stats(self, request: web.Request) -> web.StreamResponse:
        return json_response({"model_stats": self._repository.counts(self.backend.names(request))})

    async def infer(self, request: web.Request) -> web.StreamResponse:
        request[CALLS] = True
        received_s, request_id = time.monotonic(), request_id_of(request.headers)
        call = InferCall(
            self.backend, self._repository.statistics, self._model(request), request.match_info["model"]
        )
        try:
            most = self.backend.body_limit(call.model.live.revision)
            remedy = self.backend.too_large_remedy(most, call.model.live.revision)
            body = await read_body(request, most, remedy=remedy)
            asked = await self._read(request, body, call.model)
            revision, invocation = call.submit(
                asked, request.headers, request_id, received_s, caller_of(request)
            )
        except PilotflameError as error:
            return call.refused(call.function, error, request_id, caller_of(request)).response()
        return await call.finish(request, call.function, revision, invocation)

    async def _read(self, request: web.Request, body: bytes, model: TensorModel) -> InferRequest:
        header = body[: json_bytes(request.headers, len(body))]
        return await parsed(request, header, lambda _: InferRequest.read(request.headers, body, model))

    def _model(self, request: web.Request) -> TensorModel:
        """Return the model in the path. Raise UnknownFunction if it does not exist, BadInput if the function has no
        tensors.
        """
        model = self._repository.models.find(request.match_info["model"], caller_of(request).check)
        model.check_version(request.match_info.get("version", ""))
        return model

    # -- the repository

    async def index(self, request: web.Request) -> web.StreamResponse:
        asked = await self._json(request)
        ready = asked.get("ready", False) is True
        return json_response(self._repository.index(self.backend.names(request), ready=ready))

    async def load(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["function"]
        try:
            parameters = (await self._json(request)).get("parameters") or {}
            if not isinstance(parameters, dict):
                raise BadInput("parameters is no JSON object.")
            await self._repository.load(name, parameters)
        except PilotflameError as error:
            return oip_error_reply(error, request_id_of(request.headers), load_failure(name)).response()
        return json_response({})

    async def unload(self, request: web.Request) -> web.StreamResponse:
        await self._json(request)
        await self._repository.unload(request.match_info["function"])
        return json_response({})

    async def _json(self, request: web.Request) -> dict[str, Any]:
        """Return the object in a body; {} without a body."""
        body = await read_body(request, _MAX_INDEX_BYTES)
        found = load_json(body) if body else {}
        if not isinstance(found, dict):
            raise BadInput("The body is no JSON object.")
        return found

    # -- plain calls

    plain_path: ClassVar = f"{MODEL}/infer"

    def plain(self, path: str, headers: Headers, length: int) -> tuple[InferCall, str] | None:
        """Return the InferCall and the function of a plain request for inference. Return None, or raise PilotflameError, if
        aiohttp must read the request.
        """
        name, slash, verb = path.rpartition("/v2/models/")[2].partition("/")
        if (slash, verb) != ("/", "infer") or json_bytes(headers, length) > MAX_ON_LOOP_BYTES:
            return None
        name = unquote(name)
        model = self._repository.models.find(name, lambda _function: None)
        infer = InferCall(self.backend, self._repository.statistics, model, name)
        return None if length > self.backend.body_limit(model.live.revision) else (infer, infer.function)
