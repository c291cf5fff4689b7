"""Names functions, invocations and answers by the semantic conventions for FaaS and generative AI."""

from __future__ import annotations

import os
from collections.abc import Mapping

from opentelemetry.sdk.resources import Resource
from opentelemetry.util.types import AttributeValue

from ...._version import __version__
from ...ground.telemetry.invocation_end import GenerationEnd, Source

NAME = "pilotflame"
TRIGGERS: Mapping[Source, str] = {"http": "http", "queue": "pubsub", "job": "other", "batch": "other"}


def resource(name: str, **attributes: str) -> Resource:
    """Return the resource that OpenTelemetry's variables describe. If they name no service, the service is `name`."""
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    own = {} if named else {"service.name": name, "service.version": __version__}
    return Resource.create({**own, **attributes})


def model_attributes(generation: GenerationEnd) -> dict[str, AttributeValue]:
    """Return the attributes that the metrics and the span of a language model's answer have in common."""
    found: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "generate_content", "gen_ai.provider.name": "pilotflame",
        "gen_ai.request.model": generation.function,
    }  # fmt: skip
    if generation.error is not None:
        found["error.type"] = generation.error.code
    return found


def generation_attributes(generation: GenerationEnd) -> dict[str, AttributeValue]:
    """Return the attributes of the span of a language model's answer."""
    return model_attributes(generation) | {
        "gen_ai.usage.input_tokens": generation.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": generation.cached_tokens,
        "gen_ai.usage.output_tokens": generation.generated_tokens,
    }
