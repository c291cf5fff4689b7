"""Turns the messages of OpenAI's API into the form that chat templates read."""

from __future__ import annotations

from typing import Any

from ....errors import BadInput
from ...front.http.requests import load_json

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The types of parts that are texts, each with the field that has the text."""


def plain_message(message: dict[str, Any], field: str) -> dict[str, Any]:
    """Return a message with its content as one text, and with the arguments of its calls as objects. Omit members that are
    null or empty, because many templates only check whether a member exists.

    Raise BadInput, which names the request's field `field`, if the content has a part that is not a text, or if a call is
    malformed.
    """
    content = message.get("content")
    if isinstance(content, list):
        content = text_of(content, field)
    plain = {**_given(message), "content": "" if content is None else content}
    if message.get("role") == "developer":
        plain["role"] = "system"
    if isinstance(calls := plain.get("tool_calls"), list):
        plain["tool_calls"] = [_plain_call(call, field) for call in calls]
    return plain


def _given(members: dict[str, Any]) -> dict[str, Any]:
    neutral: tuple[Any, ...] = (None, [], {})
    return {name: value for name, value in members.items() if value not in neutral}


def text_of(parts: list[Any], field: str) -> str:
    """Return the text of the parts of a content. Raise BadInput if a part is not a text."""
    return "".join(part if isinstance(part, str) else _text_of(part, field) for part in parts)


def _text_of(part: Any, field: str) -> str:
    if (
        isinstance(part, dict)
        and (key := _TEXTS.get(str(part.get("type"))))
        and isinstance(part.get(key), str)
    ):
        return str(part[key])
    message = f"The body is invalid: {field}: content has a part that is no text, which pilotflame does not support yet."
    raise BadInput(message, remedy="Send texts.", details={"field": field})


def _plain_call(call: Any, field: str) -> dict[str, Any]:
    try:
        function = _given(call["function"])
        arguments = function.get("arguments") or "{}"
        arguments = load_json(arguments) if isinstance(arguments, str) else arguments
        plain = {**_given(call), "function": {**function, "arguments": arguments}}
    except (TypeError, KeyError, AttributeError, BadInput):
        message = f"The body is invalid: {field}: a call of a tool has no function, or no arguments in JSON."
        raise BadInput(
            message, remedy="Send calls as the model made them.", details={"field": field}
        ) from None
    return plain
