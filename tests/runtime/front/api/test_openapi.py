"""The OpenAPI document of a gateway: complete, every reference resolves, and responses are as it says."""

import importlib.util
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
from live import Gateway
from pilotflame._version import __version__
from pilotflame.handlers.codec import InputCodec, OutputCodec
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings
from pilotflame.runtime.ground.telemetry.rung_name import RungName
from pilotflame.runtime.node.functions.status import DesiredWorkers, FunctionStatus, Workers
from pydantic import BaseModel
from route_table import describe, described


class Leaf(BaseModel):
    size: int


class Node(BaseModel):
    leaf: Leaf
    children: list["Node"] = []


def status(name: str, annotation: Any = None, *, streaming: bool = False) -> FunctionStatus:
    return FunctionStatus(
        name=name,
        revision="r1-abc",
        created_at=datetime(2026, 1, 2, tzinfo=UTC),
        kind="plain",
        streaming=streaming,
        batch=None,
        snapshot=None,
        workers=Workers(ready=0, parked=0, starting=0, draining=0),
        desired=DesiredWorkers(awake=0, held=0, because=[]),
        standby=False,
        rung=RungName.LOCAL,
        zygote=False,
        queued=0,
        in_flight=0,
        activations=0,
        last_cold_start_ms=None,
        last_cold_start_phases_ms={},
        warnings=[],
        settings=FunctionSettings(name=name),
        input_schema=InputCodec(annotation).schema(),
        output_schema=OutputCodec(annotation).schema(),
    )


FUNCTIONS = [
    status("plain"),
    status("tree", Node),
    status("list", list[Leaf]),
    status("stream", streaming=True),
]


def references(node: Any, base: Any) -> Iterator[tuple[str, Any]]:
    """Yield each `$ref` with the schema that it is relative to: the nearest enclosing schema with an `$id`, or else `base`."""
    if isinstance(node, dict):
        base = node if "$id" in node else base
        if isinstance(node.get("$ref"), str):
            yield node["$ref"], base
        for child in node.values():
            yield from references(child, base)
    elif isinstance(node, list):
        for child in node:
            yield from references(child, base)


def resolve(reference: str, base: Any) -> Any:
    assert reference.startswith("#/"), reference
    for step in reference[2:].split("/"):
        base = base[step.replace("~1", "/").replace("~0", "~")]
    return base


@pytest.mark.parametrize("functions", [[], FUNCTIONS], ids=["none", "some"])
def test_every_reference_resolves(functions: list[FunctionStatus]) -> None:
    description = describe(functions)
    found = list(references(description, description))
    assert found
    for reference, base in found:
        assert isinstance(resolve(reference, base), dict), reference


def test_names_of_definitions_do_not_clash() -> None:
    """Two functions, or input and output, may have different classes of the same name."""
    names = [name for name in describe(FUNCTIONS)["components"]["schemas"] if name.endswith(".Leaf")]
    assert sorted(names) == ["list.input.Leaf", "list.output.Leaf", "tree.input.Leaf", "tree.output.Leaf"]


def test_each_function_has_its_path_with_its_schemas() -> None:
    description = describe(FUNCTIONS)
    paths = description["paths"]
    post = paths["/invoke/tree"]["post"]
    taken = post["requestBody"]["content"]["application/json"]["schema"]
    given = post["responses"]["200"]["content"]["application/json"]["schema"]
    leaf = resolve(resolve(taken["$ref"], description)["properties"]["leaf"]["$ref"], description)
    assert leaf["required"] == ["size"]
    assert resolve(given["$ref"], description)["properties"]["leaf"]
    assert paths["/invoke/plain"]["post"]["requestBody"]["content"]["application/json"]["schema"] == {}
    assert list(paths["/invoke/stream"]["post"]["responses"]["200"]["content"]) == ["text/event-stream"]
    assert "422" in post["responses"]
    assert {"X-Request-Timeout", "traceparent"} <= {one["name"] for one in post["parameters"]}
    assert "X-Cold-Start" in post["responses"]["200"]["headers"]
    assert "headers" not in paths["/healthz"]["get"]["responses"]["200"]
    # The paths of functions come first, because the page /docs shows the paths in this order.
    assert [path.startswith("/invoke/") for path in paths][: len(FUNCTIONS)] == [True] * len(FUNCTIONS)
    assert "/invoke/tree" not in describe([])["paths"]


def test_every_operation_is_complete() -> None:
    description = describe(FUNCTIONS)
    assert description["openapi"].startswith("3.1.")
    assert description["info"]["version"] == __version__
    operations = [
        (path, method, operation)
        for path, item in description["paths"].items()
        for method, operation in item.items()
    ]
    for path, method, operation in operations:
        assert path.startswith("/")
        assert method in {"get", "post", "put", "delete", "options"}
        assert operation["responses"]
        for code, response in operation["responses"].items():
            assert 200 <= int(code) < 600
            assert response["description"]
        named = set(re.findall(r"\{(\w+)\}", path))
        declared = {given["name"] for given in operation.get("parameters", []) if given["in"] == "path"}
        assert declared == named, path
    identifiers = [operation["operationId"] for *_, operation in operations if "operationId" in operation]
    assert len(identifiers) == len(set(identifiers))


def test_errors_are_described_as_they_are_sent() -> None:
    description = describe([])
    error = resolve(description["components"]["schemas"]["Error"]["properties"]["error"]["$ref"], description)
    assert set(error["required"]) == {"type", "message"}
    assert {"remedy", "details", "request_id"} <= set(error["properties"])


@pytest.mark.skipif(
    importlib.util.find_spec("openapi_spec_validator") is None, reason="no validator installed"
)
def test_the_validator_agrees() -> None:
    from openapi_spec_validator import validate  # type: ignore[import-not-found]

    validate(describe(FUNCTIONS))


def test_components_have_the_names_that_clients_know() -> None:
    names = {
        "ApiKey", "NewKey", "Scope", "CloudEvent", "Accepted", "Delivery", "Error", "FunctionStatus", "Job", "JobRequest",
        "JobPiece", "JobPolicy", "LambdaError", "Prediction", "RunPodJob", "RunPodRequest",
    }  # fmt: skip
    assert names <= set(describe([])["components"]["schemas"])


def test_two_dialects_share_a_path() -> None:
    """RunPod's jobs and CloudEvents have the same path and method, and different media types."""
    run = describe([])["paths"]["/v2/{function}/run"]["post"]
    assert set(run["requestBody"]["content"]) == {
        "application/json",
        "application/cloudevents+json",
        "application/cloudevents-batch+json",
    }
    assert {"200", "202", "415"} <= set(run["responses"])


@pytest.mark.asyncio(loop_scope="module")
async def test_long_schemas_are_in_the_document_of_their_function_only(gateway: Gateway, deploy: Any) -> None:
    function = await deploy(
        "from pydantic import BaseModel, Field\n"
        "class Event(BaseModel):\n    text: str = Field(description='x' * 20_000)\n"
        "def handler(event: Event):\n    pass\n"
    )
    short = await deploy("def handler(event: int):\n    pass\n")

    async def sent(name: str, **query: str) -> Any:
        found = (await gateway.client.get("/openapi.json", params=query)).json()
        described = found["paths"][f"/invoke/{name}"]["post"]
        return described["requestBody"]["content"]["application/json"]["schema"]

    assert (await sent(function.name), await sent(short.name)) == ({}, {"type": "integer"})
    assert "text" in (await sent(function.name, function=function.name))["properties"]


@pytest.mark.asyncio(loop_scope="module")
async def test_every_route_but_public_ones_describes_the_response_without_a_key(gateway: Gateway):
    paths = (await gateway.client.get("/openapi.json")).json()["paths"]
    public = (
        "/",
        "/console",
        "/console/{file}",
        "/docs",
        "/docs/page.css",
        "/docs/page.js",
        "/healthz",
        "/readyz",
        "/replicate/v1/streams/{id}",
        *(
            base + path
            for base in ("/openai", "/v2/{function}/openai", "/tgi/{function}")
            for path in ("/health", "/version")
        ),
        *(base + path for base in ("", "/oip") for path in ("/v2", "/v2/health/live", "/v2/health/ready")),
    )
    for path, operations in paths.items():
        for operation in operations.values():
            assert ("401" in operation["responses"]) is (path not in public), path
            assert ("security" in operation) is (path not in public), path


@pytest.mark.asyncio(loop_scope="module")
async def test_keys_are_sent_as_described(gateway: Gateway):
    found = (await gateway.client.get("/openapi.json")).json()
    listed = (await gateway.client.get("/v1/keys")).json()
    assert set(listed) == set(found["paths"]["/v1/keys"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]["properties"])  # fmt: skip
    async with gateway.at_home() as owner:
        made = (await owner.post("/v1/keys", json={"name": "described"})).json()
    assert set(made) == {*found["components"]["schemas"]["ApiKey"]["properties"], "key"}


def test_the_routes_of_lambda_and_sagemaker_take_signatures() -> None:
    signed = [path for path, found in describe(()).get("paths", {}).items() if {"aws": []} in found.get("post", {}).get("security", ())]  # fmt: skip
    assert signed[:2] == ["/lambda/2015-03-31/functions/{name}/invocations", "/lambda/2021-11-15/functions/{name}/response-streaming-invocations"]  # fmt: skip
    assert {path.rpartition("/")[0] for path in signed[2:]} == {"/sagemaker/endpoints/{function}"}


def test_a_function_is_described_anew_after_its_facts_change() -> None:
    """The gateway keeps the description of a function until its facts change."""
    found, api = describe([status("tree")]), described()
    assert "tree.input.Leaf" not in found["components"]["schemas"]
    api.document([status("tree")])
    document = orjson.loads(orjson.dumps(api.document([status("tree", Node)])))
    assert "tree.input.Leaf" in document["components"]["schemas"]
    assert document["paths"]["/invoke/tree"] == describe([status("tree", Node)])["paths"]["/invoke/tree"]
