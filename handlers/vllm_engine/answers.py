"""Turns vLLM's outputs into the pieces of answers, and its errors into ours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...errors import HandlerFailed, InputInvalid, Overloaded
from ..language_model.answer_form import check_answer
from ..language_model.answer_parts import AnswerParts, add_text
from ..language_model.contract import Delta, FinishReason, GenerationRequest, TokenLogprob, TokenUsage

# vLLM also has the reasons "abort" and "error". `_reason` raises for them, because the answer is not complete.
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class VllmAnswers:
    """The answers of one request."""

    def __init__(
        self, parts: Sequence[AnswerParts | None], prompt_tokens: int, top: int | None, decode: Callable[[list[int]], str],
        request: GenerationRequest | None = None, *, echoed: str = "",
    ) -> None:  # fmt: skip
        """`parts` are the readers of the answers; None: the whole answer is text. `top` is the number of likeliest tokens that the
        logprobs of each token list; None: no logprobs. `decode` returns the text of token ids, special tokens included. If
        `request` has an output format or requires a call, each answer is checked against it. `echoed` is the text before each answer.
        """
        self._request, self._said = request, defaultdict[int, list[str]](list)
        self._parts, self._top, self._decode = parts, top, decode
        self._prompt: list[TokenLogprob] | None = None
        self._usage = TokenUsage(prompt_tokens=prompt_tokens)
        self._begun, self._echoed = set[int](), echoed

    def deltas(self, output: Any) -> Iterator[Delta]:
        """Yield the pieces of a RequestOutput, whose texts and tokens follow those of earlier ones.

        Raise HandlerFailed if vLLM has aborted an answer, and OutputInvalid if an answer does not have its format.
        """
        self._usage.cached_tokens = output.num_cached_tokens or 0
        for one in output.outputs:
            scored = self._of_prompt(output) if one.index not in self._begun else None
            if scored is not None or (self._echoed and one.index not in self._begun):
                yield Delta(index=one.index, text=self._echoed, prompt_logprobs=scored)
            yield self._delta(one)

    def _of_prompt(self, output: Any) -> list[TokenLogprob] | None:
        """Return the logprobs of the prompt, if the request asks for them. vLLM has them in the first output."""
        if self._request is None or (top := self._request.prompt_logprobs) is None:
            return None
        if self._prompt is None and output.prompt_logprobs:
            first, *later = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
            found = [self._logprob(token, at, top) for token, at in later]
            self._prompt = [TokenLogprob(token=self._decode([first[0]]), id=first[0], logprob=0.0), *found]
        return self._prompt

    def _delta(self, one: Any) -> Delta:
        tokens = list(one.token_ids)
        self._usage.completion_tokens += len(tokens)
        delta = Delta(index=one.index, tokens=tokens, logprobs=self._logprobs(tokens, one.logprobs))
        ended, parts = one.finish_reason is not None, self._parts[one.index]
        add_text(delta, self._without_end(one) if parts is not None else one.text, parts, last=ended)
        if ended:
            delta.finish_reason, delta.stop_reason = _reason(one.finish_reason), one.stop_reason
            if parts is not None and parts.called and delta.finish_reason == "stop":
                delta.finish_reason = "tool_calls"
        if self._request is not None:
            said = self._said[one.index] if self._request.output is not None else []
            said.append(delta.text)
            if delta.finish_reason in ("stop", "tool_calls"):
                called = delta.finish_reason == "tool_calls" and parts is not None and parts.valid
                check_answer(self._request, "".join(said), called=called)
        if ended or one.index not in self._begun:
            delta.usage = self._usage.model_copy()
        self._begun.add(one.index)
        return delta

    def _without_end(self, one: Any) -> str:
        """Return the text without the token that has ended it.

        vLLM leaves this token in the text if the request asks to keep stop strings and special tokens in it.
        """
        text: str = one.text
        if one.finish_reason != "stop" or isinstance(one.stop_reason, str):
            return text
        return text.removesuffix(self._decode(list(one.token_ids)[-1:]))

    def _logprobs(self, tokens: Sequence[int], found: Sequence[Any] | None) -> list[TokenLogprob] | None:
        if self._top is None or found is None:
            return None
        return [self._logprob(token, at, self._top) for token, at in zip(tokens, found, strict=False)]

    def _logprob(self, token: int, found: dict[int, Any], count: int) -> TokenLogprob:
        ranked = sorted(found, key=lambda one: (found[one].rank or 0, one))
        top = [(self._text(one, found[one]), one, float(found[one].logprob)) for one in ranked[:count]]
        text, value = self._text(token, found[token]), float(found[token].logprob)
        return TokenLogprob(token=text, id=token, logprob=value, top=top, rank=found[token].rank)

    def _text(self, token: int, found: Any) -> str:
        text: str | None = found.decoded_token
        return self._decode([token]) if text is None else text


@contextmanager
def typed_failures(on_death: Callable[[], None]) -> Iterator[None]:
    """Raise vLLM's errors in the block as ours. If the engine has died, call `on_death` first.

    Raise InputInvalid for a request that vLLM refuses, Overloaded if its queue is full, and HandlerFailed otherwise.
    """
    from vllm.exceptions import GracefulHTTPError, VLLMClientError  # noqa: PLC0415
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError  # noqa: PLC0415

    try:
        yield
    except VLLMClientError as error:
        if "Grammar error" in str(error):
            fault = f"The output format or the schema of a tool cannot be used: {error}"
            raise InputInvalid(fault, remedy="Change the schema, the pattern or the grammar.") from error
        fault = f"vLLM refuses the request: {error}"
        raise InputInvalid(fault, remedy="Change the field that the message names.") from error
    except GracefulHTTPError as error:
        raise Overloaded(f"vLLM takes no request now: {error}", remedy="Try again later.") from error
    except EngineDeadError as error:
        on_death()
        raise HandlerFailed(
            "vLLM's engine has ended, so this worker ends too.",
            remedy="Call again: another worker starts. The function's log has vLLM's messages.",
            details={"cause": "engine_dead"},
        ) from error
    except EngineGenerateError as error:
        raise HandlerFailed(
            f"vLLM has failed at this request: {error.__cause__ or error}",
            remedy="The function's log has vLLM's messages.",
        ) from error


def _reason(reason: str) -> FinishReason:
    if (known := _REASONS.get(reason)) is None:
        raise HandlerFailed(
            f"vLLM has ended an answer before its end ({reason}).",
            remedy="Call again. The function's log has vLLM's messages.",
        )
    return known
