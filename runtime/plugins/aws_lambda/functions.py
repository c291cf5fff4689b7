"""Finds functions by the names that AWS Lambda's callers use, and describes them and their aliases as Lambda does."""

from __future__ import annotations

import math
import os
import re
import sys
from typing import Any, Literal, NotRequired

from aiohttp import web
from typing_extensions import TypedDict

from ....errors import MalformedRequest, UnknownFunction
from ...front.api.backend import Backend
from ...front.http.requests import caller_of
from ...front.http.responses import ErrorBody, json_response
from ...front.http.routes import Parameter, Route
from ...ground.access.keys import Scope
from ...node.functions.live import Live
from .failures import LambdaError, aws_error
from .handler import ACCOUNT, DEFAULT_REGION

VERSION = "$LATEST"
BASE = "/2015-03-31/functions/{name}"
NAME = Parameter("name", "A name or an ARN, each with `:qualifier` after it or not.", place="path")
QUALIFIER = Parameter("Qualifier", f"{VERSION}, or the number, the id or an alias of the live revision.")
_BEFORE_NAME = re.compile(r"^(arn(:[^:]*){4}:|\d+:(?=function:))?(function:)?")


class Configuration(TypedDict):
    """A function without its code. Environment variables are not shown."""

    FunctionName: str
    FunctionArn: str
    Version: str
    RevisionId: str
    Runtime: str
    Handler: str
    Timeout: int
    MemorySize: NotRequired[int]
    LastModified: str
    CodeSha256: str
    PackageType: Literal["Zip"]
    State: Literal["Active"]
    LastUpdateStatus: Literal["Successful"]


class DescribedFunction(TypedDict):
    """A function. Its code cannot be downloaded."""

    Configuration: Configuration
    Code: dict[str, str]
    Tags: dict[str, str]


class AliasConfiguration(TypedDict):
    """An alias of the live revision."""

    AliasArn: str
    Name: str
    FunctionVersion: str


class FunctionsApi:
    """The routes that describe functions."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def routes(self) -> list[Route]:
        def row(path: str, handler: Any, summary: str, response: Any, *more: Parameter) -> Route:
            return Route(
                "GET", f"{BASE}{path}", handler, Scope.INVOKE, summary, response, parameters=(NAME, *more),
                errors=(400, 404, 503), aws_signed=True, error_format=aws_error, error_type=LambdaError | ErrorBody,
            )  # fmt: skip

        configuration = "Show a function's configuration as AWS Lambda does."
        return [
            row("", self.function, "Show a function as AWS Lambda does.", DescribedFunction, QUALIFIER),
            row("/configuration", self.configuration, configuration, Configuration, QUALIFIER),
            row(
                "/aliases", self.aliases, "List a function's aliases.", {"Aliases": list[AliasConfiguration]}
            ),
            row("/aliases/{alias}", self.alias, "Show an alias.", AliasConfiguration),
        ]

    async def function(self, request: web.Request) -> web.StreamResponse:
        live, qualifier = find_live(request, self._backend)
        found = DescribedFunction(Configuration=self._shown(request, live, qualifier), Code={}, Tags={})
        return json_response(found)

    async def configuration(self, request: web.Request) -> web.StreamResponse:
        return json_response(self._shown(request, *find_live(request, self._backend)))

    def _shown(self, request: web.Request, live: Live, qualifier: str) -> Configuration:
        """Return what the caller may see. Only the owner sees the digest and the entry of the code."""
        found = _configuration(live, qualifier)
        owned = self._backend.functions.owns(caller_of(request), live.record.function)
        return found if owned else Configuration(**{**found, "Handler": "", "CodeSha256": ""})

    async def aliases(self, request: web.Request) -> web.StreamResponse:
        live, _ = find_live(request, self._backend)
        return json_response({"Aliases": [_alias(live, name) for name in live.record.settings.aliases]})

    async def alias(self, request: web.Request) -> web.StreamResponse:
        live, _ = find_live(request, self._backend)
        if (name := request.match_info["alias"]) not in live.record.settings.aliases:
            raise UnknownFunction(f"Function {live.record.function!r} has no alias {name[:64]!r}.")
        return json_response(_alias(live, name))


def find_live(request: web.Request, backend: Backend) -> tuple[Live, str]:
    """Return the function and the qualifier that the request names. Without a qualifier, return "" for it.

    Raise UnknownFunction if the qualifier is not $LATEST, nor the number, the id or an alias of the live
    revision. Raise MalformedRequest if the name and the parameter have different qualifiers.
    """
    # The path holds `name`, `account:function:name` or an ARN. Each of these may end with `:qualifier`.
    name, _, qualifier = _BEFORE_NAME.sub("", request.match_info["name"]).partition(":")
    caller_of(request).check(name)
    live = backend.functions.get(name)
    wanted = request.query.get(QUALIFIER.name, "") or qualifier
    if qualifier not in ("", wanted):
        message = f"The name has the qualifier {qualifier[:64]!r}, and the parameter {wanted[:64]!r}."
        raise MalformedRequest(message, remedy="Send one of them.")
    record = live.record
    if wanted not in ("", VERSION, str(record.number), record.revision, *record.settings.aliases):
        remedy = f"Omit it, or send {VERSION} or {record.number}, the number of the live revision."
        raise UnknownFunction(f"Function {name!r} has no version {wanted[:64]!r}.", remedy=remedy)
    return live, wanted


def version_of(live: Live, qualifier: str) -> str:
    return VERSION if qualifier in ("", VERSION) else str(live.record.number)


def _configuration(live: Live, qualifier: str) -> Configuration:
    record, status = live.record, live.status()
    found = Configuration(
        FunctionName=record.function, FunctionArn=_arn(live, qualifier), Version=version_of(live, qualifier),
        RevisionId=record.revision, Runtime=f"python{sys.version_info.major}.{sys.version_info.minor}",
        Handler=status.entry, Timeout=math.ceil(record.settings.timeout_s),
        LastModified=record.created_at.isoformat(timespec="milliseconds"), CodeSha256=record.code_digest,
        PackageType="Zip", State="Active", LastUpdateStatus="Successful",
    )  # fmt: skip
    if memory_mb := record.settings.resources.memory_mb:
        found["MemorySize"] = memory_mb
    return found


def _alias(live: Live, name: str) -> AliasConfiguration:
    return AliasConfiguration(AliasArn=_arn(live, name), Name=name, FunctionVersion=str(live.record.number))


def _arn(live: Live, qualifier: str) -> str:
    # Do not take the region from the function's environment, which only the owner may see.
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or DEFAULT_REGION
    arn = f"arn:aws:lambda:{region}:{ACCOUNT}:function:{live.record.function}"
    return f"{arn}:{qualifier}" if qualifier else arn
