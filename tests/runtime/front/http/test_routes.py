"""The route table: the scope of each path, rows that share a path, and the document that describes all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pilotflame.errors import PluginError, UnsupportedMedia
from pilotflame.runtime.front.http.routes import (
    Route,
    aiohttp_routes,
    based,
    error_formats,
    joined,
    scopes_by_route,
)
from pilotflame.runtime.ground.access.keys import Scope
from route_table import described


def table() -> list[Route]:
    return described().routes


async def handler(_request: Any) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("POST /invoke/{function}", Scope.INVOKE),
        ("POST /v2/{function}/run", Scope.INVOKE),
        ("POST /v2/{function}/warmup", Scope.INVOKE),
        ("POST /cog/predictions", Scope.INVOKE),
        ("POST /cog/predictions/{id}/cancel", Scope.INVOKE),
        ("GET /cog/health-check", None),
        ("POST /lambda/2015-03-31/functions/{name}/invocations", Scope.INVOKE),
        ("POST /v1/functions", Scope.DEPLOY),
        ("DELETE /v1/functions/{function}", Scope.DEPLOY),
        ("POST /v1/functions/{function}/prefetch", Scope.DEPLOY),
        ("GET /v1/functions", Scope.READ),
        ("GET /v1/functions/{function}", Scope.READ),
        ("GET /v1/functions/{function}/logs", Scope.DEPLOY),
        ("GET /v1/functions/{function}/decisions", Scope.READ),
        ("GET /v1/functions/{function}/load", Scope.READ),
        ("GET /v1/functions/{function}/arrivals", Scope.READ),
        ("PUT /v1/functions/{function}/secrets/{key}", Scope.DEPLOY),
        ("GET /v1/functions/{function}/webhooks/secret", Scope.DEPLOY),
        ("GET /openapi.json", None),
        ("GET /metrics", Scope.READ),
        ("GET /v1/console", Scope.READ),
        ("GET /v1/logs", Scope.READ),
        ("GET /v1/logs/{log}", Scope.ADMIN),
        ("POST /v1/keys", Scope.ADMIN),
        ("DELETE /v1/keys/{id}", Scope.ADMIN),
    ],
)
def test_a_route_needs_its_scope(path: str, scope: Scope | None):
    method, _, path = path.partition(" ")
    assert scopes_by_route(table())[method, path] is scope


def test_the_scope_read_changes_nothing():
    assert {method for (method, _), scope in scopes_by_route(table()).items() if scope is Scope.READ} == {
        "GET"
    }


# The routes below a function that do not need the scope `deploy`: jobs, which callers submit, and data for dashboards.
JOBS = "/v1/functions/{function}/jobs"
FOR_DASHBOARDS = [f"/v1/functions/{{function}}/{kind}" for kind in ("arrivals", "decisions", "load")]


@pytest.mark.parametrize(
    ("beginning", "scope"),
    [("/invoke/", Scope.INVOKE), ("/v2/", Scope.INVOKE), ("/cog/predictions", Scope.INVOKE),
     ("/lambda/2015-03-31/", Scope.INVOKE), (JOBS, Scope.INVOKE), ("/v1/functions/{function}/", Scope.DEPLOY), ("/v1/keys", Scope.ADMIN)],
)  # fmt: skip
def test_all_paths_below_one_need_the_same_scope(beginning: str, scope: Scope):
    found = [
        found
        for (_, path), found in scopes_by_route(table()).items()
        if path.startswith(beginning)
        and path not in FOR_DASHBOARDS
        and path.startswith(JOBS) == (beginning == JOBS)
    ]
    assert found
    assert set(found) == {scope}


def test_only_health_the_page_and_signed_streams_are_public():
    public = {route.path for route in table() if route.public}
    page = {"/console", "/console/{file}", "/docs", "/docs/page.css", "/docs/page.js"}
    triton = {"/oip/v2", "/oip/v2/health/live", "/oip/v2/health/ready"}
    vllm = {"/openai/health", "/openai/version"}
    assert public == {"/", "/healthz", "/readyz", "/replicate/v1/streams/{id}", *page, *triton, *vllm}


def test_rows_of_a_route_may_not_differ_in_scope():
    rows = [Route("POST", "/x", handler, Scope.ADMIN, ""), Route("POST", "/x", handler, Scope.INVOKE, "")]
    with pytest.raises(ValueError, match="/x"):
        scopes_by_route(rows)


def test_rows_that_share_method_and_path_are_one_route():
    found = [(route.method, route.path) for route in aiohttp_routes(table())]
    assert len(found) == len(set(found))
    assert len([method for method, _ in found if method != "HEAD"]) < len(table())


def test_two_owners_of_one_route_are_refused_with_both_names():
    def rows(**more: Any) -> list[Route]:
        return [Route("POST", "/x", handler, Scope.INVOKE, "", **more)]

    with pytest.raises(PluginError, match="POST /x is a route of one and of other"):
        joined({"one": rows(), "other": rows()})
    # Two plugins may share a route if one of them chooses by the headers.
    assert len(joined({"one": rows(), "other": rows(accepts=bool)})) == 2


async def test_rows_that_share_a_path_choose_by_the_headers():
    async def special(_request: Any) -> Any:
        return "special"

    async def plain(_request: Any) -> Any:
        return "plain"

    rows = [
        Route("POST", "/x", plain, Scope.INVOKE, ""),
        Route("POST", "/x", special, Scope.INVOKE, "", accepts=lambda headers: "special" in headers),
    ]
    request: Any = SimpleNamespace(headers={"special": "1"}, path="/x")
    other: Any = SimpleNamespace(headers={}, path="/x")
    [both], [alone] = aiohttp_routes(rows), aiohttp_routes(rows[1:])
    assert [await both.handler(one) for one in (request, other)] == ["special", "plain"]  # type: ignore[arg-type, misc]
    with pytest.raises(UnsupportedMedia):
        await alone.handler(other)  # type: ignore[arg-type, misc]


def test_dialects_have_errors_of_their_own():
    found = error_formats(table())
    lambdas = [path for path in found if path.startswith("/lambda/")]
    assert lambdas == ["/lambda/2015-03-31/functions/", "/lambda/2021-11-15/functions/"]
    assert {path.strip("/").partition("/")[0] for path in found} == {
        "anthropic",
        "cog",
        "lambda",
        "oip",
        "openai",
        "replicate",
        "tgi",
        "tensorflow-serving",
        "kserve",
        "sagemaker",
        "torchserve",
        "vertex",
    }


def test_a_beginning_that_several_formats_share_is_left_to_the_whole_paths():
    async def own(*_: Any) -> Any:
        raise NotImplementedError

    form: Any = own
    rows = [
        Route("POST", "/x/{function}/a", handler, Scope.INVOKE, "", error_format=form),
        Route("POST", "/x/{function}/b", handler, Scope.INVOKE, ""),
        Route("POST", "/y/{function}/a", handler, Scope.INVOKE, "", error_format=form),
    ]
    assert error_formats(rows) == {"/x/{function}/a": form, "/y/": form}


def test_rows_have_each_prefix_and_those_with_a_path_of_their_own_also_none():
    rows = [Route("POST", path, handler, Scope.INVOKE, "") for path in ("", "/a")]
    found = based("/x/{function}", rows, ("/y",), bare=rows)
    assert [row.path for row in found] == ["/x/{function}", "/x/{function}/a", "/y", "/y/a", "/a"]
    assert len(based("/x", rows)) == 2
