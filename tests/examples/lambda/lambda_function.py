import json
import os

FUNCTION = os.environ["AWS_LAMBDA_FUNCTION_NAME"]


def lambda_handler(event, context):
    if event.get("fail"):
        raise KeyError(event["fail"])
    return {
        "statusCode": 200,
        "body": json.dumps({"message": "hello " + event.get("name", "world")}),
        "request": context.aws_request_id,
        "function": [FUNCTION, context.function_name, context.invoked_function_arn],
        "memory": int(context.memory_limit_in_mb) > 0,
        "time_left": 0 < context.get_remaining_time_in_millis() <= 900_000,
        "log": [context.log_group_name, bool(context.log_stream_name)],
        "nobody": [context.identity.cognito_identity_id, context.client_context],
        "counts": {1: "one"},
    }
