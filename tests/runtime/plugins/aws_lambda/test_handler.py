"""Lambda functions, unchanged, deployed to a real gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from live import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_example(deploy_folder: Callable[..., Any]) -> None:
    function = await deploy_folder("lambda")
    assert (function.described["dialect"], function.described["entry"]) == (
        "lambda",
        "lambda_function.py:lambda_handler",
    )
    answer = await function.answer({"name": "Ada"}, X_Request_Id="mine")
    assert json.loads(answer.pop("body")) == {"message": "hello Ada"}
    assert answer == {
        "statusCode": 200,
        "request": "mine",
        "function": ["lambda", "lambda", "arn:aws:lambda:us-east-1:000000000000:function:lambda"],
        "memory": True,
        "time_left": True,
        "log": ["/aws/lambda/lambda", True],
        "nobody": [None, None],
        "counts": {"1": "one"},
    }
    # Without a body, the event is empty.
    assert (await function.client.post(function.path)).json()["statusCode"] == 200


@pytest.mark.parametrize("asynchronous", ["", "async "])
async def test_a_failure_is_told_as_lambda_tells_it(deploy: Callable[..., Any], asynchronous: str) -> None:
    source = f"""
class Refused(Exception):
    pass
def inner(event):
    raise Refused("no " + event)
{asynchronous}def lambda_handler(event, context):
    return inner(event)
"""
    function = await deploy(None, files={"app.py": source})
    error = await function.error("entry")
    assert (error["status"], error["type"]) == (500, "handler_failed")
    details = error["details"]
    assert (details["errorType"], details["errorMessage"]) == ("Refused", "no entry")
    assert [frame.split(", in ")[1].splitlines()[0] for frame in details["stackTrace"]] == [
        "lambda_handler",
        "inner",
    ]
    assert (details["file"], details["line"]) == ("app.py", 5)


async def test_the_environment_is_lambdas_and_the_settings_come_first(deploy: Callable[..., Any]) -> None:
    source = """
import os
SEEN = {name: os.environ[name] for name in ("_HANDLER", "AWS_LAMBDA_FUNCTION_VERSION", "AWS_LAMBDA_FUNCTION_MEMORY_SIZE")}
def run(event, context):
    context.log("a line")
    return {**SEEN, "memory": context.memory_limit_in_mb, "arn": context.invoked_function_arn}
"""
    settings = {
        "handler": "lambda:sub.py:run", "env.AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "512", "env.AWS_REGION": "eu-central-1",
    }  # fmt: skip
    function = await deploy(None, settings, files={"sub.py": source})
    answer = await function.answer()
    assert answer["arn"].startswith("arn:aws:lambda:eu-central-1:000000000000:function:")
    assert (answer["_HANDLER"], answer["memory"]) == ("sub.run", "512")
    assert answer["AWS_LAMBDA_FUNCTION_MEMORY_SIZE"] == "512"
    await function.logged("a line")


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("def lambda_handler(event, context):\n    yield 1\n", "is a generator"),
        ("lambda_handler = 5\n", "defines no function 'lambda_handler'"),
    ],
)
async def test_what_cannot_be_served_is_said_at_deploy(gateway: Gateway, source: str, word: str) -> None:
    response = await gateway.send(None, files={"app.py": source})
    assert response.status_code == 422
    assert word in response.json()["error"]["message"]


NUMBERS = """
import os
from decimal import Decimal
def lambda_handler(event, context):
    if event.get("give") == "decimals":
        return {"price": Decimal("1.10"), "many": [Decimal("1E+30"), Decimal(3)], 7: Decimal("0.1")}
    if event.get("give") == "nan":
        return {"price": Decimal("NaN")}
    return {"sum": event["n"] + 1, "same": event["n"], "kind": type(event["n"]).__name__}
"""


async def test_decimals_and_integers_of_any_size_keep_their_digits(deploy: Callable[..., Any]) -> None:
    function = await deploy(None, files={"app.py": NUMBERS})
    for number in (2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**60, 12):
        response = await function.call({"n": number})
        assert response.text == f'{{"sum":{number + 1},"same":{number},"kind":"int"}}'
        assert response.headers["Content-Type"] == "application/json"
    response = await function.call({"give": "decimals"})
    assert response.text == '{"price":1.10,"many":[1E+30,3],"7":0.1}'
    error = await function.error({"give": "nan"})
    assert (error["status"], error["type"]) == (500, "output_invalid")
    assert "answer.price" in error["message"]
    body = b'{"n": ' + b"1" * 5000 + b"}"
    response = await function.client.post(function.path, content=body)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "bad_json")


SURROUNDINGS = """
import os
def lambda_handler(event, context):
    names = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_EXECUTION_ENV", "AWS_LAMBDA_INITIALIZATION_TYPE")
    identity = context.identity
    return {
        **{name: os.environ.get(name) for name in names},
        "identity": [identity.cognito_identity_id, identity.cognito_identity_pool_id],
    }
"""


async def test_the_region_and_the_identity(deploy: Callable[..., Any]) -> None:
    answer = await (await deploy(None, files={"app.py": SURROUNDINGS})).answer()
    assert answer["AWS_REGION"] == answer["AWS_DEFAULT_REGION"] == "us-east-1"
    assert answer["AWS_EXECUTION_ENV"].startswith("AWS_Lambda_python3.")
    assert answer["AWS_LAMBDA_INITIALIZATION_TYPE"] == "on-demand"
    assert answer["identity"] == [None, None]
    other = await deploy(None, {"env.AWS_DEFAULT_REGION": "eu-west-1"}, files={"app.py": SURROUNDINGS})
    assert (await other.answer())["AWS_REGION"] == "eu-west-1"


async def test_mangum_0_19_serves_a_web_app(deploy: Callable[..., Any]) -> None:
    """Mangum asks for the event loop of the main thread, as most code for Lambda does, so the worker must have set one."""
    source = """
from fastapi import FastAPI, Request
from mangum import Mangum
app = FastAPI()
@app.get("/hello")
async def hello(request: Request, name: str):
    return {"hello": name, "arn": request.scope["aws.context"].invoked_function_arn}
lambda_handler = Mangum(app)
"""
    http = {"method": "GET", "path": "/hello", "sourceIp": "192.0.2.1", "protocol": "HTTP/1.1"}
    event = {
        "version": "2.0", "routeKey": "$default", "rawPath": "/hello", "rawQueryString": "name=Ada", "headers": {"host": "here"},
        "requestContext": {"http": http, "stage": "$default"}, "isBase64Encoded": False,
    }  # fmt: skip
    function = await deploy(None, {"handler": "lambda:app.py:lambda_handler"}, files={"app.py": source})
    for _ in range(2):
        answer = await function.answer(event)
        assert answer["statusCode"] == 200
        assert json.loads(answer["body"])["hello"] == "Ada"
