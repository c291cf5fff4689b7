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
