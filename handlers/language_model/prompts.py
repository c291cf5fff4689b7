"""Turns requests into the tokens of prompts, by the model's tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from ...errors import InputInvalid
from .chat_form import THOUGHT
from .contract import Delta, Effort, GenerationRequest, PromptTokens

CHARS_A_TOKEN = 8
"""If a text has more than this number of characters for each token that a prompt may have, it is turned into tokens part by part, and
is refused as soon as the parts have too many tokens.
"""
MOST_VALUES, TOKEN_VALUES = 300_000, 6
"""The most values in the logprobs of a prompt. Each token of the prompt counts as TOKEN_VALUES values, and each of the likeliest
tokens in its place as one value. The JSON of a value has 5 marks (`foreign_json.MAX_MARKS`).
"""
PROBE = "pilotflame probe"
"""The content of a trial message. If a chat template shows it, the template reads contents in the form of this message."""


class Prompt(NamedTuple):
    """`text` is what the chat template has made; "" if the request has a prompt of its own."""

    ids: list[int]
    text: str


class Prompts:
    """The prompts of one model."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)
        """The characters of the longest token."""
        self._with_parts = _roles_with_parts(tokenizer) if tokenizer.chat_template else frozenset()
        """The roles whose contents the chat template reads as lists of parts. It would leave out a plain text."""

    def prompt(self, request: GenerationRequest, most: int) -> Prompt:
        """Return the prompt of a request. Raise InputInvalid if it does not fit the model, which takes `most` tokens.

        The time depends on `most`, and not on the length of the request.
        """
        self._check_tokens(request)
        text, ids = "", request.prompt
        cut = _Cut.of(request, most)
        if request.messages is not None:
            # Refuse them before the template runs: each message has at least one token.
            if len(request.messages) > most:
                raise _too_long(most)
            text = self._templated(request)
            ids = self._encoded(text, most, cut, add_special_tokens=request.add_special_tokens is True)
        elif isinstance(ids, str):
            ids = self._encoded(ids, most, cut, add_special_tokens=request.add_special_tokens is not False)
        elif cut is not None:
            ids = cut.of_list(list(ids or ()))
        elif ids is not None and len(ids) > most:
            raise _too_long(most)
        found: list[int] = list(ids or ()) or self._first()
        if cut is not None and len(found) > most:
            raise _too_long(most)
        if not found or not all(0 <= token < self._vocabulary for token in found):
            raise InputInvalid(
                f"The prompt has no tokens, or one that is none of the model's {self._vocabulary}.",
                remedy="Send another text.",
            )
        return Prompt(found, text)

    def listed(self, request: GenerationRequest, most: int) -> Delta:
        """Return the tokens of a prompt as the only piece of an answer. Raise the errors of `prompt`."""
        of, ids = self._tokenizer, self.prompt(request, most).ids
        tokens = PromptTokens(ids=ids, pieces=of.convert_ids_to_tokens(ids), text=of.decode(ids), most=most)
        return Delta(prompt=tokens, finish_reason="length")

    def _encoded(self, text: str, most: int, cut: _Cut | None, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text. Raise InputInvalid if they are clearly more than `most`."""
        if cut is not None:
            # Keep the characters of one more token: at the cut, the first or the last token may differ from that of the whole text.
            text = cut.of_text(text, (cut.tokens + 1) * self._longest)
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            special: list[int] = self._tokenizer.encode("", add_special_tokens=add_special_tokens)
            special = special if ids[: len(special)] == special else []
            return special + cut.of_list(ids[len(special) :], len(special))
        part, tokens = most * CHARS_A_TOKEN, 0
        for begin in range(0, len(text), part) if len(text) > part else ():
            tokens += len(self._tokenizer.encode(text[begin : begin + part], add_special_tokens=False))
            # A cut between two parts may divide a token into several, at most one for each character.
            tokens -= self._longest
            if tokens > most:
                raise _too_long(most)
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return found

    def bad_words(self, request: GenerationRequest) -> list[list[int]]:
        """Return the tokens of each text that may not be made. As in vLLM, also return the tokens that a text has after a space,
        unless their number differs.
        """
        found: list[list[int]] = []
        for word in request.bad_words:
            plain, spaced = (
                self._tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " ")
            )
            found += [plain] if plain else []
            if plain and len(spaced) == len(plain) and spaced[0] != plain[0]:
                found.append(spaced)
        return found

    def _check_tokens(self, request: GenerationRequest) -> None:
        """Raise InputInvalid, as vLLM does, if a field names a token that the model does not have."""
        named = {"logit_bias": request.logit_bias, "allowed_token_ids": request.allowed_token_ids or ()}
        for field, tokens in named.items():
            wrong = [token for token in tokens if not 0 <= token < self._vocabulary]
            if wrong:
                raise InputInvalid(
                    f"{field} names the token {wrong[0]}, which is none of the model's {self._vocabulary}.",
                    remedy="Name tokens of the model.",
                    details={"field": field},
                )

    def single_tokens(self, texts: Collection[str]) -> set[str]:
        """Return which of these texts are one token of the model."""
        known: dict[str, int] = self._tokenizer.get_vocab()
        return {*texts} & known.keys()

    def _first(self) -> list[int]:
        """Return the token that replaces an empty prompt: the one that begins, or else the one that ends a sequence."""
        of = self._tokenizer
        return [token for token in (of.bos_token_id, of.eos_token_id) if token is not None][:1]

    def _templated(self, request: GenerationRequest) -> str:
        if not self._tokenizer.chat_template:
            raise InputInvalid(
                "This model has no chat template, so it takes no messages.",
                remedy="Send a prompt, or add chat_template.jinja to the model's folder.",
            )
        variables = request.chat_template_kwargs | self._effort(request.reasoning_effort)
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
        for shown, tool in zip(tools, request.tools, strict=True):
            shown["function"]["parameters"] = tool.function.arguments
        try:
            text: str = self._tokenizer.apply_chat_template(
                _in_form(request.messages or [], self._with_parts), tokenize=False,
                add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
                continue_final_message=request.continue_final_message, tools=tools or None, **variables,
            )  # fmt: skip
        except Exception as error:
            # The template is a program of the model's authors, and may raise any exception.
            raise InputInvalid(
                f"The model's chat template does not take these messages: {error}",
                remedy="Change the messages.",
            ) from error
        return text

    def _effort(self, effort: Effort | None) -> dict[str, Any]:
        """Return the variable of the chat template that says how much the model reasons. Raise InputInvalid if there is none."""
        template = str(self._tokenizer.chat_template)
        if effort is None:
            return {}
        if "reasoning_effort" in template:
            return {"reasoning_effort": effort}
        if "enable_thinking" in template:
            return {"enable_thinking": effort != "none"}
        if effort == "none" and THOUGHT not in template:
            return {}
        raise InputInvalid(
            "reasoning_effort has no effect on this model: its chat template does not read it.",
            remedy="Leave reasoning_effort out.",
        )


class _Cut(NamedTuple):
    """Which tokens of a prompt are kept."""

    tokens: int
    last: bool
    """True for the last tokens, False for the first ones."""

    @classmethod
    def of(cls, request: GenerationRequest, most: int) -> _Cut | None:
        """Return which tokens a request keeps, if a sequence has at most `most`; None if it keeps all."""
        if (tokens := request.truncate_prompt_tokens) is None:
            return None
        room = most - (request.max_tokens or 1)
        # Keep up to `most` + 1 tokens, so that a prompt that is still too long is refused.
        kept = max(1, room) if tokens < 0 else min(tokens, most + 1)
        return cls(kept, request.truncation_side == "left")

    def of_text(self, text: str, chars: int) -> str:
        return text[-chars:] if self.last else text[:chars]

    def of_list(self, ids: list[int], others: int = 0) -> list[int]:
        """Return the tokens that are kept, if `others` other tokens are kept, too."""
        count = max(0, self.tokens - others)
        return ids[max(0, len(ids) - count) :] if self.last else ids[:count]


def _in_form(messages: Sequence[dict[str, Any]], with_parts: Collection[str]) -> list[dict[str, Any]]:
    """Return messages with the contents of the roles `with_parts` as lists of parts."""
    return [
        {**message, "content": [{"type": "text", "text": text}] if text else []}
        if message.get("role") in with_parts and isinstance(text := message.get("content"), str)
        else message
        for message in messages
    ]


def _roles_with_parts(tokenizer: Any) -> frozenset[str]:
    """Return the roles whose content the chat template shows only if it is a list of parts."""

    def shows(messages: list[dict[str, Any]], with_parts: Collection[str]) -> bool:
        try:
            return PROBE in tokenizer.apply_chat_template(_in_form(messages, with_parts), tokenize=False)
        except Exception:  # noqa: BLE001  a template raises what it likes
            return False

    found = set[str]()
    said, call = (
        {"role": "user", "content": "a"},
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}},
    )
    before: dict[str, list[dict[str, Any]]] = {
        "user": [], "system": [], "assistant": [said],
        "tool": [said, {"role": "assistant", "content": "", "tool_calls": [call]}],
    }  # fmt: skip
    for role, turns in before.items():
        after = [] if role == "user" else [said]
        messages = [*turns, {"role": role, "content": PROBE, "tool_call_id": "c"}, *after]
        if not shows(messages, found) and shows(messages, found | {role}):
            found.add(role)
    return frozenset(found)


def _too_long(
    most: int, asked: str = "the prompt is too long", remedy: str = "Shorten the prompt."
) -> InputInvalid:
    """Return the error for a request with too many tokens. Its message has the words that litellm and langchain look for."""
    message = f"This model's maximum context length is {most} tokens: {asked}."
    return InputInvalid(message, remedy=remedy, details={"reason": "context_length_exceeded"})


def most_new_tokens(request: GenerationRequest, prompt: int, most: int) -> int:
    """Return how many tokens each answer may have after `prompt` tokens, if a sequence has at most `most` tokens.

    Raise InputInvalid if there is no room for a token, or if max_tokens is more than the room.
    """
    room, wanted = most - prompt, request.max_tokens
    if room < 1 or (wanted is not None and wanted > room):
        asked = f" and max_tokens {wanted}" if wanted is not None else ""
        raise _too_long(
            most,
            f"the prompt is too long, with {prompt} tokens{asked}",
            "Shorten the prompt, or lower max_tokens.",
        )
    return room if wanted is None else wanted


def check_prompt_logprobs(request: GenerationRequest, tokens: int) -> None:
    """Raise InputInvalid if the logprobs of a prompt with `tokens` tokens would be too large, or would be sent several times."""
    if (top := request.prompt_logprobs) is None:
        return
    message, remedy = "", "Set n to 1."
    if request.n > 1:
        message = "prompt_logprobs, or echo with logprobs, goes with n 1 only."
    elif tokens > (most := MOST_VALUES // (TOKEN_VALUES + top)):
        message = (
            f"prompt_logprobs {top}, or echo with logprobs {top}, takes a prompt of {most} tokens at most."
        )
        remedy = "Shorten the prompt, or ask for fewer of the likeliest tokens."
    if message:
        raise InputInvalid(message, remedy=remedy, details={"field": "prompt_logprobs"})
