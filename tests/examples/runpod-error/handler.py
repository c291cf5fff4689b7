import os

import runpod
from runpod.serverless.utils.rp_validator import validate

INPUT_SCHEMA = {
    "number": {"type": int, "required": True},
    "fresh": {"type": bool, "required": False, "default": False},
}


def handler(event):
    checked = validate(event["input"], INPUT_SCHEMA)
    if "errors" in checked:
        return {"error": checked["errors"]}
    job_input = checked["validated_input"]
    if job_input["number"] == 13:
        return {"error": "13 is not served here"}
    if job_input["number"] == 42:
        raise ValueError("42 is too much")
    return {"root": job_input["number"] ** 0.5, "pid": os.getpid(), "refresh_worker": job_input["fresh"]}


if __name__ == "__main__":
    runpod.serverless.start({"handler": handler})
