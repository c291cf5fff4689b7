"""Reads the parameters of SageMaker's operations, which clients send as headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....errors import BadInput
from ....handlers.codec import JSON_TYPE
from ...front.http.routes import Parameter, header
from ...node.functions.live import Live

VARIANT = "AllTraffic"
"""The name that SageMaker gives the only variant of an endpoint."""
PREFIX = "X-Amzn-SageMaker-"
CUSTOM, INFERENCE_ID, TARGET = (
    f"{PREFIX}Custom-Attributes",
    f"{PREFIX}Inference-Id",
    f"{PREFIX}Target-Variant",
)
REFUSED = {
    "Target-Model": "TargetModel", "Target-Container-Hostname": "TargetContainerHostname", "Session-Id": "SessionId",
    "Enable-Explanations": "EnableExplanations", "Inference-Component": "InferenceComponentName", "Prefix-Aware-Id": "PrefixAwareId",
}  # fmt: skip
"""The headers of parameters that pilotflame does not have, and the names of these parameters."""
MAX_CHARS = 1024
PARAMETERS: tuple[Parameter, ...] = (
    header(CUSTOM, "The handler finds it in context.extra.", type="string", maxLength=MAX_CHARS),
    header(INFERENCE_ID, "The handler finds it in context.extra.", type="string"),
    header(
        TARGET, f"{VARIANT}, the number of the live revision, or a name in the function's setting `aliases`."
    ),
)

LOCATION = f"{PREFIX}InputLocation"
ASYNC_PARAMETERS = (
    *PARAMETERS[:2],
    header(LOCATION, "The input, as s3://bucket/key. The body may be the input instead."),
    header(f"{PREFIX}Content-Type", "The media type of the input, if it is not that of the object."),
    header(
        f"{PREFIX}RequestTTLSeconds", "How long the job may exist.", type="integer", minimum=1, maximum=21_600
    ),
    header(
        f"{PREFIX}InvocationTimeoutSeconds",
        "How long a call may take.",
        type="integer",
        minimum=1,
        maximum=3600,
    ),
)


def facts_in(headers: Mapping[str, str]) -> dict[str, str]:
    """Return what the handler finds in `context.extra`. Raise BadInput for a parameter that pilotflame does not have."""
    for name, parameter in REFUSED.items():
        if f"{PREFIX}{name}" in headers:
            fault = f"pilotflame does not support {parameter}."
            raise BadInput(fault, remedy="Omit it.", details={"field": parameter})
    facts = {"custom_attributes": headers.get(CUSTOM, ""), "inference_id": headers.get(INFERENCE_ID, "")}
    if len(facts["custom_attributes"]) > MAX_CHARS:
        raise BadInput("CustomAttributes is too long.", remedy=f"Send at most {MAX_CHARS} characters.")
    return {name: value for name, value in facts.items() if value}


def check_target(headers: Mapping[str, str], live: Live) -> None:
    """Raise BadInput if the request names another variant than the live revision."""
    variant, record = headers.get(TARGET, VARIANT), live.record
    if variant not in (VARIANT, str(record.number), *record.settings.aliases):
        fault = f"Variant {variant[:64]} of endpoint {record.function} not found."
        raise BadInput(fault, remedy=f"Omit TargetVariant, or send {VARIANT}.")


def limits_in(headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the limits of a job that the request names. Raise BadInput for a parameter that pilotflame does not have."""
    for parameter in ("S3OutputPathExtension", "Filename"):
        if f"{PREFIX}{parameter}" in headers:
            raise BadInput(
                f"pilotflame does not support {parameter}.", remedy="Omit it.", details={"field": parameter}
            )
    if headers.get(f"{PREFIX}Accept", JSON_TYPE) not in (JSON_TYPE, "*/*"):
        raise BadInput(
            "pilotflame does not support Accept here.", remedy="Omit it: the handler chooses the type."
        )
    names = (
        ("RequestTTLSeconds", "ttl_s", 21_600),
        ("InvocationTimeoutSeconds", "execution_timeout_s", 3600),
    )
    found: dict[str, Any] = {}
    for parameter, name, most in names:
        text = headers.get(f"{PREFIX}{parameter}")
        if text is None:
            continue
        if not (text.isascii() and text.isdecimal() and len(text) < 6 and 1 <= int(text) <= most):
            fault = f"{parameter} is {text[:40]!r}."
            raise BadInput(
                fault, remedy=f"It must be a whole number from 1 to {most}.", details={"field": parameter}
            )
        found[name] = float(text)
    return found
