"""The models as Together's client of PyPI reads them: a bare list of models, each with its type.

The client's other requests have OpenAI's form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from aiohttp import hdrs
from typing_extensions import TypedDict

from ....handlers.encoders import EmbeddingRequest, RerankRequest
from ...front.generation.models import takes
from ...node.functions.live import Live

# Version 1 of the client needs prices. Version 2 needs all of these prices or none.
_PRICES = dict.fromkeys(("base", "finetune", "hourly", "input", "output"), 0.0)


class TogetherModel(TypedDict):
    """A function with a language model."""

    id: str
    object: str
    created: int
    type: Literal["chat", "embedding", "rerank"]
    pricing: dict[str, float]


def is_together(headers: Mapping[str, str]) -> bool:
    """Return True if the request is of Together's client, such as `Together/Python 2.42.0` or `AsyncTogether/Python 2.42.0`."""
    return "together/" in headers.get(hdrs.USER_AGENT, "").lower()


def together_model(live: Live) -> TogetherModel:
    created = int(live.record.created_at.timestamp())
    kind: Literal["chat", "embedding", "rerank"] = "chat"
    if takes(live, EmbeddingRequest):
        kind = "embedding"
    elif takes(live, RerankRequest):
        kind = "rerank"
    return {
        "id": live.record.function,
        "object": "model",
        "created": created,
        "type": kind,
        "pricing": _PRICES,
    }
