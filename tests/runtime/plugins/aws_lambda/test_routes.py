"""Lambda's invocations, with boto3 and with plain HTTP."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import boto3
import pytest
import pytest_asyncio
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError
from live import WAITS_ASYNC, Function, Gate, Gateway, gateway_here, short_folder, until
from pilotflame.errors import (
    ActivationTimeout,
    BadInput,
    PilotflameError,
    QueueFull,
    Unauthorized,
    UnknownFunction,
)
from pilotflame.runtime.front.http import guard, requests
from pilotflame.runtime.front.http.unverified_bodies import UnverifiedBodies
from pilotflame.runtime.plugins.aws_lambda.failures import aws_error

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    print('heard', event, flush=True)\n    return {'got': event}\n"
LAMBDA = """
def lambda_handler(event, context):
    if event.get("fail"):
        raise ValueError(event["fail"])
    return {"id": context.aws_request_id, "name": context.function_name, "event": event}
"""
FAILS = "def handler(event):\n    raise ValueError('no good')\n"
DIES = "import os\ndef handler(event):\n    os._exit(3)\n"
SLOW = "import gate\ndef handler(event):\n    gate.wait()\n"
STREAMS = "def handler(event):\n    for n in range(event):\n        yield n\n"


async def test_deadlines_and_priorities_are_those_of_invoke(deploy, gateway: Gateway):
    function = await deploy("def handler(event, context):\n    return context.remaining_ms()")
    path = f"/lambda/2015-03-31/functions/{function.name}/invocations"
    for name, value in (("X-Request-Timeout", "20"), ("grpc-timeout", "20S")):
        response = await gateway.client.post(path, headers={name: value})
        assert 0 < response.json() <= 20_000
    for name in ("X-Request-Timeout", "X-Priority"):
        response = await gateway.client.post(path, headers={name: "soon"})
        assert response.status_code == 400
        assert name in response.text


def client_of(url: str, token: str | None = None, *, key: str = "any", secret: str = "any") -> Any:
    """Return a client of boto3 that sends its requests to the gateway."""
    return boto3.client(
        "lambda", endpoint_url=f"{url}/lambda", region_name="us-east-1", aws_access_key_id=key, aws_secret_access_key=secret,
        aws_session_token=token, config=Config(retries={"total_max_attempts": 1}, proxies={}),
    )  # fmt: skip


@pytest.fixture(scope="module")
def aws(gateway: Gateway) -> Any:
    return client_of(gateway.url)


async def invoke(client: Any, name: str, event: Any = None, **more: Any) -> dict[str, Any]:
    """Invoke a function. In the returned response, the payload is decoded from JSON."""

    def called() -> dict[str, Any]:
        payload = {} if event is None else {"Payload": json.dumps(event)}
        found = dict(client.invoke(FunctionName=name, **payload, **more))
        body = found["Payload"].read()
        found["Payload"] = json.loads(body) if body else None
        return found

    return await asyncio.to_thread(called)


async def refused(client: Any, name: str, **more: Any) -> tuple[str, int]:
    """Return (error code, HTTP status) of an invocation that must be refused."""
    with pytest.raises(ClientError) as raised:
        await invoke(client, name, **more)
    told = raised.value.response
    assert told["Error"]["Message"]
    return told["Error"]["Code"], told["ResponseMetadata"]["HTTPStatusCode"]


# -- boto3


async def test_request_and_response(deploy, aws):
    function = await deploy(ECHO)
    found = await invoke(aws, function.name, {"n": 1})
    assert (found["StatusCode"], found["Payload"]) == (200, {"got": {"n": 1}})
    assert found["ExecutedVersion"] == "$LATEST"
    assert "FunctionError" not in found
    assert found["ResponseMetadata"]["RequestId"]


async def test_a_function_written_for_lambda(gateway: Gateway, aws):
    assert (await gateway.send(None, files={"lambda_function.py": LAMBDA}, name="thumbs")).status_code == 201
    found = await invoke(aws, "thumbs", {"n": 1})
    assert found["Payload"] == {
        "id": found["ResponseMetadata"]["RequestId"], "name": "thumbs", "event": {"n": 1},
    }  # fmt: skip
    assert (await invoke(aws, "thumbs"))["Payload"]["event"] == {}
    failed = await invoke(aws, "thumbs", {"fail": "no good"})
    assert (failed["StatusCode"], failed["FunctionError"]) == (200, "Unhandled")
    told = failed["Payload"]
    assert (told["errorType"], told["errorMessage"]) == ("ValueError", "no good")
    assert "lambda_function.py" in told["stackTrace"][-1]
    await gateway.client.delete("/v1/functions/thumbs")


async def test_an_event_is_a_job(deploy, aws, gate: Gate):
    function = await deploy(
        "import gate\ndef handler(event):\n    gate.wait(event['word'])\n    return 1\n", gate=gate
    )
    found = await invoke(aws, function.name, {"word": "left"}, InvocationType="Event")
    assert (found["StatusCode"], found["Payload"]) == (202, None)
    (await gate.next("left")).go()
    job = found["ResponseMetadata"]["RequestId"]

    async def done() -> bool:
        response = await function.client.get(f"/v2/{function.name}/status/{job}")
        return bool(response.json()["status"] == "COMPLETED")

    await until(done, "the end of the job")


async def test_the_same_idempotency_key_is_the_same_job(deploy):
    function = await deploy(ECHO)
    path = f"/lambda/2015-03-31/functions/{function.name}/invocations"
    headers = {"X-Amz-Invocation-Type": "Event", "Idempotency-Key": "once"}
    found = [await function.client.post(path, json=n, headers=headers) for n in (2, 2, 3)]
    assert [one.status_code for one in found] == [202, 202, 409]
    assert found[0].headers["X-Job-Id"] == found[1].headers["X-Job-Id"]
    assert [one.headers.get("Idempotent-Replayed") for one in found] == [None, "true", None]


async def test_a_dry_run_runs_nothing(deploy, aws):
    function = await deploy(ECHO, check=False)
    assert (await invoke(aws, function.name, {}, InvocationType="DryRun"))["StatusCode"] == 204
    assert (await function.status())["activations"] == 0
    assert await refused(aws, "none", InvocationType="DryRun") == ("ResourceNotFoundException", 404)


async def test_names_and_arns(deploy, aws):
    function = await deploy(ECHO)
    arn = f"arn:aws:lambda:us-east-1:000000000000:function:{function.name}"
    revision = (await function.status())["revision"]
    for name in (
        arn,
        f"{arn}:$LATEST",
        f"{function.name}:{revision}",
        f"000000000000:function:{function.name}",
    ):
        assert (await invoke(aws, name, 1))["Payload"] == {"got": 1}
    assert (await invoke(aws, function.name, 1, Qualifier="$LATEST"))["Payload"] == {"got": 1}
    for name in (f"{function.name}:7", f"{arn}:nightly"):
        assert await refused(aws, name) == ("ResourceNotFoundException", 404)
    assert await refused(aws, function.name, Qualifier="7") == ("ResourceNotFoundException", 404)


async def test_the_log_tail(deploy, aws):
    function = await deploy(ECHO)
    found = await invoke(aws, function.name, 1, LogType="Tail")
    assert f"REPORT RequestId: {found['ResponseMetadata']['RequestId']}" in base64.b64decode(found["LogResult"]).decode()  # fmt: skip
    assert "LogResult" not in await invoke(aws, function.name, 1)


async def test_errors_are_aws_exceptions(deploy, aws, gate: Gate):
    function = await deploy(SLOW, {"max_queue": 1, "max_body_bytes": 1000, "scale.max": 1}, gate=gate)
    with pytest.raises(aws.exceptions.ResourceNotFoundException):
        await invoke(aws, "none")
    with pytest.raises(aws.exceptions.RequestTooLargeException):
        await invoke(aws, function.name, "x" * 1000)
    with pytest.raises(aws.exceptions.RequestTooLargeException):
        await invoke(aws, function.name, "x" * 1000, InvocationType="Event")
    running = asyncio.ensure_future(function.call())
    await gate.next()
    waiting = asyncio.ensure_future(function.call())

    async def full() -> bool:
        return bool((await function.status())["queued"] == 1)

    await until(full, "a full queue")
    with pytest.raises(aws.exceptions.TooManyRequestsException):
        await invoke(aws, function.name)
    gate.open()
    await asyncio.gather(running, waiting)


async def test_failures_of_functions(deploy, aws, gate: Gate):
    for source, settings, kind in (
        (FAILS, {}, "ValueError"),
        (DIES, {}, "Runtime.ExitError"),
        (SLOW, {"timeout_s": 0.5}, "Sandbox.Timedout"),
        ("def handler(event):\n    return float('nan')\n", {}, "Runtime.MarshalError"),
        ("def handler(event: int) -> int:\n    return event\n", {}, "input_invalid"),
    ):
        found = await invoke(aws, (await deploy(source, settings, gate=gate)).name, "x")
        assert (found["StatusCode"], found["FunctionError"], found["Payload"]["errorType"]) == (200, "Unhandled", kind)  # fmt: skip
        assert found["Payload"]["errorMessage"]


async def test_a_streamed_output_is_a_list(deploy, aws):
    function = await deploy(STREAMS)
    assert (await invoke(aws, function.name, 3))["Payload"] == [0, 1, 2]
    assert (await invoke(aws, function.name, 0))["Payload"] == []


CONTEXT = """
def lambda_handler(event, context):
    sent = context.client_context
    client = sent and sent.client
    return {
        "custom": sent and sent.custom, "env": sent and sent.env, "title": client and client.app_title,
        "version": client and client.app_version_name, "arn": context.invoked_function_arn,
    }
"""


async def test_the_client_context(deploy, aws):
    function = await deploy(None, files={"lambda_function.py": CONTEXT})
    sent = {"custom": {"k": "v"}, "env": {"locale": "de"}, "client": {"app_title": "shop"}}
    packed = base64.b64encode(json.dumps(sent).encode()).decode()
    told = (await invoke(aws, function.name, ClientContext=packed))["Payload"]
    assert (told["custom"], told["env"], told["title"], told["version"]) == ({"k": "v"}, {"locale": "de"}, "shop", None)  # fmt: skip
    assert (await invoke(aws, function.name))["Payload"]["custom"] is None
    for kind in ("RequestResponse", "Event"):
        for wrong in ("no base64", base64.b64encode(b"[1]").decode(), base64.b64encode(b"x" * 4000).decode()):
            assert await refused(aws, function.name, ClientContext=wrong, InvocationType=kind) == (
                "InvalidRequestContentException",
                400,
            )
    queued = await invoke(aws, function.name, {}, ClientContext=packed, InvocationType="Event")
    status = f"/v2/{function.name}/status/{queued['ResponseMetadata']['RequestId']}"

    async def done() -> bool:
        return bool((await function.client.get(status)).json()["status"] == "COMPLETED")

    await until(done, "the end of the job")
    assert (await function.client.get(status)).json()["output"]["custom"] == {"k": "v"}


async def test_qualifiers_are_the_live_revision(deploy, gateway: Gateway, aws):
    function = await deploy(None, files={"lambda_function.py": CONTEXT}, name="twice")
    await deploy(None, {"aliases": "prod,Blue_2"}, files={"lambda_function.py": CONTEXT}, name="twice")
    revision = (await function.status())["revision"]
    number = revision[1:].partition("-")[0]
    for qualifier in (number, revision, "prod", "Blue_2"):
        found = await invoke(aws, "twice", Qualifier=qualifier)
        assert (found["ExecutedVersion"], found["Payload"]["arn"].rpartition(":")[2]) == (number, qualifier)
    found = await invoke(aws, "twice", Qualifier="$LATEST")
    assert found["ExecutedVersion"] == "$LATEST"
    assert found["Payload"]["arn"].endswith(":function:twice:$LATEST")
    assert (await invoke(aws, "twice"))["Payload"]["arn"].endswith(":function:twice")
    for old in ("1", "0", "green"):
        assert await refused(aws, "twice", Qualifier=old) == ("ResourceNotFoundException", 404)


async def test_aliases_in_names(deploy, aws):
    await deploy(None, {"aliases": "prod"}, files={"lambda_function.py": CONTEXT}, name="named")
    arn = "arn:aws:lambda:us-east-1:000000000000:function:named"
    for name in ("named:prod", f"{arn}:prod", "000000000000:function:named:prod", "function:named:prod"):
        found = await invoke(aws, name)
        assert (found["ExecutedVersion"], found["Payload"]["arn"]) == ("1", f"{arn}:prod"), name
        assert (await invoke(aws, name, Qualifier="prod"))["ExecutedVersion"] == "1"
        assert await refused(aws, name, Qualifier="$LATEST") == ("InvalidParameterValueException", 400)


async def test_get_function_and_aliases(deploy, aws):
    function = await deploy(
        None, {"aliases": "prod,blue", "timeout_s": 12.5}, files={"lambda_function.py": LAMBDA}
    )
    name = function.name
    arn = f"arn:aws:lambda:us-east-1:000000000000:function:{name}"

    def asked() -> None:
        for waiter in ("function_exists", "function_active_v2", "function_updated_v2", "function_active"):
            aws.get_waiter(waiter).wait(FunctionName=name, WaiterConfig={"MaxAttempts": 1})
        whole = aws.get_function(FunctionName=name)
        found = whole["Configuration"]
        assert (found["FunctionName"], found["FunctionArn"], found["Version"]) == (name, arn, "$LATEST")
        assert (found["State"], found["LastUpdateStatus"], found["Timeout"]) == ("Active", "Successful", 13)
        assert (found["Handler"], whole["Tags"]) == ("lambda_function.py:lambda_handler", {})
        assert "Environment" not in found
        alone = aws.get_function_configuration(FunctionName=name, Qualifier="prod")
        assert (alone["Version"], alone["FunctionArn"]) == ("1", f"{arn}:prod")
        assert aws.get_function(FunctionName=f"{arn}:blue")["Configuration"]["Version"] == "1"
        alias = aws.get_alias(FunctionName=name, Name="prod")
        assert (alias["AliasArn"], alias["Name"], alias["FunctionVersion"]) == (f"{arn}:prod", "prod", "1")
        assert [one["Name"] for one in aws.list_aliases(FunctionName=arn)["Aliases"]] == ["prod", "blue"]
        for missing in (
            lambda: aws.get_function(FunctionName="none"), lambda: aws.get_function(FunctionName=name, Qualifier="9"),
            lambda: aws.get_alias(FunctionName=name, Name="green"),
        ):  # fmt: skip
            with pytest.raises(aws.exceptions.ResourceNotFoundException):
                missing()

    await asyncio.to_thread(asked)


async def test_a_function_that_does_not_start_is_unhandled(deploy, aws):
    """The answer has the same form when the breaker is open and the gateway refuses calls at once."""
    source = "def setup(context):\n    raise ValueError('no weights')\ndef handler(event): ...\n"
    function = await deploy(source, check=False)

    async def open_breaker() -> bool:
        found = await invoke(aws, function.name)
        assert (found["StatusCode"], found["FunctionError"]) == (200, "Unhandled")
        assert found["Payload"]["errorType"] in ("Runtime.InitError", "ValueError"), found
        assert "no weights" in found["Payload"]["errorMessage"]
        return "starts of a worker" in found["Payload"]["errorMessage"]

    await until(open_breaker, "an open breaker")


# -- response streams


async def streamed(
    client: Any, name: str, event: Any = None, **more: Any
) -> tuple[list[bytes], dict[str, Any]]:
    """Return (payloads, the last event) of a response stream, as botocore reads it."""

    def called() -> tuple[list[bytes], dict[str, Any]]:
        found = client.invoke_with_response_stream(FunctionName=name, Payload=json.dumps(event), **more)
        assert found["ExecutedVersion"] == "$LATEST"
        events = list(found["EventStream"])
        assert [list(one) for one in events] == [["PayloadChunk"]] * (len(events) - 1) + [["InvokeComplete"]]
        return [one["PayloadChunk"]["Payload"] for one in events[:-1]], events[-1]["InvokeComplete"]

    return await asyncio.to_thread(called)


async def test_a_response_stream(deploy, aws):
    source = "def handler(event):\n    for word in event:\n        yield word\n"
    pieces, end = await streamed(aws, (await deploy(source)).name, ["one ", "zwei ü", 3, {"a": [None]}])
    assert b"".join(pieces) == 'one zwei ü3\n{"a":[null]}\n'.encode()
    assert end == {}
    pieces, end = await streamed(aws, (await deploy(ECHO)).name, {"n": 1}, LogType="Tail")
    assert json.loads(b"".join(pieces)) == {"got": {"n": 1}}
    assert "REPORT RequestId" in base64.b64decode(end["LogResult"]).decode()
    large = "x" * 3_000_000
    pieces, _ = await streamed(aws, (await deploy(ECHO)).name, large)
    assert json.loads(b"".join(pieces)) == {"got": large}
    assert len(pieces) == 3


async def test_pieces_of_a_response_stream_arrive_while_it_runs(deploy, aws, gate: Gate):
    source = (
        "import gate\ndef handler(event):\n    yield 'first'\n    gate.wait('middle')\n    yield 'second'\n"
    )
    function = await deploy(source, gate=gate)

    def first() -> tuple[Any, bytes]:
        events = iter(aws.invoke_with_response_stream(FunctionName=function.name)["EventStream"])
        return events, next(events)["PayloadChunk"]["Payload"]

    events, piece = await asyncio.to_thread(first)
    assert piece == b"first"
    (await gate.next("middle")).go()
    rest = await asyncio.to_thread(list, events)
    assert rest == [{"PayloadChunk": {"Payload": b"second"}}, {"InvokeComplete": {}}]


async def test_a_response_stream_that_fails(deploy, aws, gate: Gate):
    source = "def handler(event):\n    yield 'a'\n    raise ValueError('no good')\n"
    pieces, end = await streamed(aws, (await deploy(source)).name)
    assert pieces == [b"a"]
    assert end["ErrorCode"] == "ValueError"
    assert json.loads(end["ErrorDetails"])["errorMessage"]
    pieces, end = await streamed(aws, (await deploy(FAILS)).name)
    assert (pieces, end["ErrorCode"]) == ([], "ValueError")
    pieces, end = await streamed(aws, (await deploy(SLOW, {"timeout_s": 0.5}, gate=gate)).name)
    assert (pieces, end["ErrorCode"]) == ([], "Sandbox.Timedout")
    with pytest.raises(aws.exceptions.ResourceNotFoundException):
        await streamed(aws, "none")
    response = aws.invoke_with_response_stream
    name = (await deploy(ECHO)).name
    dry = await asyncio.to_thread(lambda: response(FunctionName=name, InvocationType="DryRun"))
    assert dry["StatusCode"] == 204
    with pytest.raises(ClientError) as raised:
        await asyncio.to_thread(lambda: response(FunctionName=name, InvocationType="Event"))
    assert raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400


async def test_a_reader_of_a_response_stream_that_disconnects_cancels(deploy, gate: Gate):
    source = """
import gate
async def handler(event):
    try:
        yield "first"
        await gate.wait_async("begun")
        yield "second"
    finally:
        gate.say("over")
"""
    function = await deploy(source, gate=gate)
    url = f"/lambda/2021-11-15/functions/{function.name}/response-streaming-invocations"
    async with function.client.stream("POST", url) as response:
        assert response.headers["X-Accel-Buffering"] == "no"
        # Keep the iterator in a variable, because httpx closes the response when the iterator is closed.
        pieces = response.aiter_raw()
        await anext(pieces)
        await gate.next("begun")
    await gate.next("over")


# -- plain HTTP


def path(function: Function) -> str:
    return f"/lambda/2015-03-31/functions/{function.name}/invocations"


async def test_a_body_that_is_not_json_is_refused(deploy):
    function = await deploy(ECHO)
    for kind in ("Event", "RequestResponse"):
        response = await function.client.post(path(function), content=b"{", headers={"X-Amz-Invocation-Type": kind})  # fmt: skip
        assert response.status_code == 400
        assert response.headers["x-amzn-ErrorType"] == "InvalidRequestContentException"
        assert response.json()["Type"] == "User"
    response = await function.client.post(path(function), headers={"X-Amz-Invocation-Type": "Later"})
    assert response.status_code == 400


async def test_a_caller_that_disconnects_cancels(deploy, gate: Gate):
    function = await deploy(WAITS_ASYNC, gate=gate)
    call = asyncio.ensure_future(function.client.post(path(function)))
    await gate.next("begun")
    call.cancel()
    await gate.next("cancelled")


async def test_calls_are_counted(deploy):
    function = await deploy(ECHO)
    await function.client.post(path(function), json=1)
    text = (await function.client.get("/metrics")).text
    assert any(f'function="{function.name}"' in line and 'code="200"' in line and line.endswith(" 1.0") for line in text.splitlines())  # fmt: skip


# -- with keys


async def test_the_session_token_is_the_api_key(state):
    async with gateway_here(state, auth="always", drain_s=1.0) as gateway:
        async with gateway.at_home() as home:

            async def key(**wanted: Any) -> str:
                return str((await home.post("/v1/keys", json={"name": "k", **wanted})).json()["key"])

            gateway.client.headers["Authorization"] = f"Bearer {await key(scopes=['admin'])}"
            await gateway.deploy(ECHO, name="mine")
            await gateway.deploy(ECHO, name="theirs")
            token = await key(functions=["mine"])
        client = client_of(gateway.url, token)
        assert (await invoke(client, "mine", 1))["Payload"] == {"got": 1}
        assert (await invoke(client, "mine:$LATEST", 1, InvocationType="Event"))["StatusCode"] == 202
        assert await refused(client, "theirs") == ("ResourceNotFoundException", 404)
        assert await refused(client, "arn:aws:lambda:us-east-1:000000000000:function:theirs") == ("ResourceNotFoundException", 404)  # fmt: skip
        for wrong in (None, "pf_000000000000_" + "0" * 64):
            assert await refused(client_of(gateway.url, wrong), "mine") == (
                "UnrecognizedClientException",
                401,
            )


async def test_a_key_signs_the_requests_of_boto3(state):
    async with (
        gateway_here(state, auth="always", drain_s=1.0, max_body_bytes=100_000) as gateway,
        gateway.at_home() as home,
    ):

        async def key(**wanted: Any) -> dict[str, Any]:
            return dict((await home.post("/v1/keys", json={"name": "k", "aws": True, **wanted})).json())

        admin, mine, quota = await key(scopes=["admin"]), await key(functions=["mine"]), await key(concurrency=1, rate_per_s=0.01)  # fmt: skip
        gateway.client.headers["Authorization"] = f"Bearer {admin['key']}"
        await gateway.deploy(STREAMS, name="mine")
        await gateway.deploy(ECHO, name="theirs")

        def client(made: dict[str, Any]) -> Any:
            return client_of(gateway.url, key=made["id"], secret=made["key"].rpartition("_")[2])

        aws = client(mine)
        assert (await invoke(aws, "mine", 2))["Payload"] == [0, 1]
        arn = "arn:aws:lambda:us-east-1:000000000000:function:mine"
        assert (await invoke(aws, arn, 1, Qualifier="$LATEST"))["Payload"] == [0]
        assert (await invoke(aws, "mine", 1, InvocationType="Event"))["StatusCode"] == 202
        assert b"".join((await streamed(aws, "mine", 2))[0]) == b"0\n1\n"
        assert await refused(aws, "theirs") == ("ResourceNotFoundException", 404)
        wrong = client_of(gateway.url, key=mine["id"], secret="0" * 64)
        unknown = client_of(gateway.url, key="0" * 12, secret="0" * 64)
        for stranger in (wrong, unknown):
            assert await refused(stranger, "mine") == ("UnrecognizedClientException", 401)
        with pytest.raises(aws.exceptions.RequestTooLargeException):
            await invoke(aws, "mine", "x" * 200_000)
        # The gateway hashes a body of this size in a thread.
        large = "x" * 50_000
        assert (await invoke(client(admin), "theirs", large))["Payload"] == {"got": large}
        assert await refused(wrong, "mine", Payload=json.dumps(large)) == ("UnrecognizedClientException", 401)
        # Neither the list of keys nor their file shows the secret that signs requests.
        found = (await home.get("/v1/keys")).text
        assert "signing" not in found
        assert mine["key"].rpartition("_")[2] not in (state / "access" / "keys.json").read_text()
        await invoke(client(quota), "mine", 1)
        assert await refused(client(quota), "mine") == ("TooManyRequestsException", 429)
        assert (await home.delete(f"/v1/keys/{mine['id']}")).status_code == 200
        assert await refused(aws, "mine") == ("UnrecognizedClientException", 401)


async def test_a_signature_opens_no_other_route(state):
    async with gateway_here(state, auth="always", drain_s=1.0) as gateway, gateway.at_home() as home:
        made = (await home.post("/v1/keys", json={"name": "k", "aws": True, "scopes": ["admin"]})).json()
        credentials = Credentials(made["id"], made["key"].rpartition("_")[2])
        for path in ("/v1/functions", "/v1/keys", "/metrics", "/v2/f/health"):
            request = AWSRequest("GET", gateway.url + path)
            SigV4Auth(credentials, "lambda", "us-east-1").add_auth(request)
            response = await gateway.client.get(path, headers=dict(request.headers.items()))
            assert response.status_code == 401


def signed_head(
    gateway: Gateway, key_id: str, secret: str, body: bytes = b"", length: int | None = None
) -> bytes:
    """Return the bytes of a request that boto3's signer has signed. With `length`, Content-Length announces a longer body."""
    path = "/lambda/2015-03-31/functions/mine/invocations"
    request = AWSRequest("POST", gateway.url + path, data=body)
    SigV4Auth(Credentials(key_id, secret), "lambda", "us-east-1").add_auth(request)
    lines = [f"POST {path} HTTP/1.1", f"Host: {gateway.url.partition('//')[2]}", "Connection: close"]
    lines += [
        f"{name}: {value}" for name, value in request.headers.items() if name.lower() != "content-length"
    ]
    lines += [f"Content-Length: {len(body) if length is None else length}", "", ""]
    return "\r\n".join(lines).encode() + body


async def answer_to(gateway: Gateway, sent: bytes) -> tuple[int, dict[str, Any]]:
    """Send bytes over a connection, and return the status and body of the response."""
    reader, writer = await asyncio.open_connection(*gateway.url.partition("//")[2].split(":"))
    try:
        writer.write(sent)
        async with asyncio.timeout(10):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(line for line in head.lower().split("\r\n") if line.startswith("content-length:"))
            body = await reader.readexactly(int(length.partition(":")[2]))
    finally:
        writer.close()
    return int(head.split()[1]), {
        name: value for name, value in json.loads(body).items() if name == "Message"
    }


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time limit for the bodies of requests to 0.3 s."""
    monkeypatch.setattr(requests, "BODY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(guard, "BODY_TIMEOUT_S", 0.3)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def keyed() -> AsyncIterator[Gateway]:
    """A gateway with keys and the function `mine`."""
    with short_folder() as folder:
        async with gateway_here(folder / "state", auth="always", drain_s=1.0) as gateway:
            async with gateway.at_home() as home:
                admin = (
                    await home.post("/v1/keys", json={"name": "k", "aws": True, "scopes": ["admin"]})
                ).json()["key"]
            gateway.client.headers["Authorization"] = f"Bearer {admin}"
            await gateway.deploy(ECHO, name="mine")
            yield gateway


async def signing_key(gateway: Gateway, **wanted: Any) -> tuple[str, str]:
    """Return the id and the secret of a new key."""
    made = (await gateway.client.post("/v1/keys", json={"name": "k", "aws": True, **wanted})).json()
    return made["id"], made["key"].rpartition("_")[2]


async def test_refusals_do_not_tell_which_keys_exist(keyed: Gateway):
    known, _ = await signing_key(keyed)
    expired, secret = await signing_key(keyed, expires_in_s=0.001)
    answers = [
        await answer_to(keyed, signed_head(keyed, *credentials, body=b"{}"))
        for credentials in ((known, "0" * 64), ("0" * 12, "0" * 64), (expired, secret))
    ]
    assert answers[0][0] == 401
    assert answers[1:] == answers[:1] * 2


@pytest.mark.usefixtures("soon")
async def test_the_quota_counts_before_the_body_is_read(keyed: Gateway):
    key = await signing_key(keyed, concurrency=5, rate_per_s=0.001, burst=1)
    # A request that names the key but has a false signature does not use the key's quota.
    assert (await answer_to(keyed, signed_head(keyed, key[0], "0" * 64, b"{}")))[0] == 401
    assert (await answer_to(keyed, signed_head(keyed, *key, length=50_000)))[0] == 408
    assert (await answer_to(keyed, signed_head(keyed, *key, body=b"{}")))[0] == 200
    assert (await answer_to(keyed, signed_head(keyed, *key, length=50_000)))[0] == 429


@pytest.mark.usefixtures("soon")
async def test_unverified_requests_take_nothing_of_the_quota_of_the_key_that_they_name(keyed: Gateway):
    key = await signing_key(keyed, concurrency=1, rate_per_s=0.001, burst=1)
    unfinished = signed_head(keyed, key[0], "0" * 64, length=50_000)
    stuck = [asyncio.create_task(answer_to(keyed, unfinished)) for _ in range(3)]
    # The stuck requests arrive while this call is answered. Then the gateway waits for their bodies.
    await keyed.client.get("/v1/functions")
    assert (await answer_to(keyed, signed_head(keyed, *key, body=b"{}")))[0] == 200
    assert {status for status, _ in await asyncio.gather(*stuck)} == {408}


@pytest.mark.usefixtures("soon")
async def test_few_large_bodies_are_read_before_they_are_verified(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(UnverifiedBodies.__init__, "__defaults__", (1, 1))
    with short_folder() as folder:
        async with gateway_here(folder / "state", auth="always", drain_s=1.0) as gateway:
            async with gateway.at_home() as home:
                made = (await home.post("/v1/keys", json={"name": "k", "aws": True})).json()
            stuck = signed_head(gateway, made["id"], "0" * 64, length=1_000_000)
            statuses = [
                one[0] for one in await asyncio.gather(*(answer_to(gateway, stuck) for _ in range(3)))
            ]
    # The body of the first request does not arrive in time: 408. The other requests wait for their turn as long: 503.
    assert set(statuses) == {408, 503}


@pytest.mark.parametrize(
    ("error", "name", "status", "whose"),
    [
        (UnknownFunction("no f"), "ResourceNotFoundException", 404, "User"),
        (BadInput("no JSON"), "InvalidRequestContentException", 400, "User"),
        (QueueFull("full"), "TooManyRequestsException", 429, "User"),
        (Unauthorized("who?"), "UnrecognizedClientException", 401, "User"),
        (ActivationTimeout("late"), "ServiceException", 503, "Service"),
    ],
)
async def test_each_error_has_its_name(error: PilotflameError, name: str, status: int, whose: str):
    response = aws_error(error, "r-1")
    assert (response.status, response.headers["x-amzn-ErrorType"]) == (status, name)
    assert response.headers["x-amzn-RequestId"] == "r-1"
    assert isinstance(response.body, bytes)
    assert json.loads(response.body) == {"Type": whose, "Message": error.message}
    assert ("Retry-After" in response.headers) == (status in (429, 503))
