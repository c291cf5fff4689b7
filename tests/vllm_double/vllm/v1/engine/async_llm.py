"""An engine that answers with the tokens of its prompt, in the order of the prompt, and then ends."""

import asyncio
from typing import ClassVar

from transformers import AutoTokenizer

from ...logprobs import Logprob
from ...outputs import CompletionOutput, RequestOutput
from .core import CoreHere, CoreProcess
from .exceptions import EngineDeadError, EngineGenerateError


class AsyncLLM:
    """Tests read `calls`, and set the other attributes. A prompt that begins with "wait" is answered but for its end."""

    separate = True
    calls: ClassVar[list] = []
    tokens_at_once = 1
    cached = 0
    failure: Exception | None = None

    def __init__(self, vllm_config) -> None:
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        self.tokenizer = AutoTokenizer.from_pretrained(self.model_config.model)
        self.core = (CoreProcess if self.separate else CoreHere)(vllm_config)
        self.sleeping = 0

    @classmethod
    def from_vllm_config(cls, vllm_config, start_engine_loop=True, *, disable_log_stats=False):
        return cls(vllm_config)

    def shutdown(self, timeout: float | None = None) -> None:
        self.calls.append("shutdown")
        self.core.close(timeout)

    async def generate(self, prompt, sampling_params, request_id, *, lora_request=None, priority=0):
        self.calls.append((prompt, sampling_params, lora_request, priority))
        try:
            if not self.core.alive:
                raise EngineDeadError
            if self.failure is not None:
                raise self.failure
            async for output in self._outputs(prompt["prompt_token_ids"], sampling_params, request_id):
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            await self.abort(request_id)
            raise
        except ValueError as error:
            raise EngineGenerateError from error

    async def abort(self, request_id, internal: bool = False) -> None:
        self.calls.append("abort")

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.sleeping = level
        self.calls.append(("sleep", level))

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        if not self.core.alive:
            raise EngineDeadError
        self.sleeping = 0
        self.calls.append("wake_up")
        return True

    async def _outputs(self, ids, params, request_id):
        assert not self.sleeping
        writers = [_Writer(self.tokenizer, ids, params, index) for index in range(params.n)]
        # As with RequestOutputKind.DELTA: the first output only has them.
        scored = (
            None if params.prompt_logprobs is None else [None, *({one: Logprob(-0.25, 2)} for one in ids[1:])]
        )
        while not all(one.ended for one in writers):
            pieces = [one.step(self.tokens_at_once) for one in writers if not one.ended]
            ended = all(one.ended for one in writers)
            if ended and self.tokenizer.decode(ids).startswith("wait"):
                await asyncio.Event().wait()
            yield RequestOutput(request_id, None, ids, scored, pieces, ended, num_cached_tokens=self.cached)
            scored = None


class _Writer:
    """One answer. It stops before its `stop` strings, and at most `max_tokens`."""

    def __init__(self, tokenizer, ids, params, index) -> None:
        self._tokenizer, self._params, self._index = tokenizer, params, index
        self._left = [*ids, tokenizer.eos_token_id]
        self._made, self._shown, self.ended = [], 0, False

    def step(self, count: int) -> CompletionOutput:
        params, tokenizer = self._params, self._tokenizer
        new, reason, stop = self._left[:count], None, None
        del self._left[:count]
        self._made += new
        last = self._made[-1]
        if last in (params.stop_token_ids or ()) or last == tokenizer.eos_token_id:
            reason, stop = "stop", last if last in (params.stop_token_ids or ()) else None
        visible = self._made[:-1] if reason and not params.include_stop_str_in_output else self._made
        text = tokenizer.decode(visible, skip_special_tokens=params.skip_special_tokens)
        # A character whose end is still to come.
        text = text if reason else text.rstrip("\ufffd")
        for found in params.stop or ():
            if found in text:
                reason, stop = "stop", found
                text = text[: text.find(found) + len(found) * params.include_stop_str_in_output]
        if reason is None and len(self._made) >= params.max_tokens:
            reason = "length"
        self.ended = reason is not None
        # Text that may become a stop string is held back.
        held = 0 if self.ended else max((len(one) - 1 for one in params.stop or ()), default=0)
        shown = text[self._shown : len(text) - held]
        self._shown += len(shown)
        return CompletionOutput(self._index, shown, new, None, self._logprobs(new), reason, stop)

    def _logprobs(self, tokens):
        if (top := self._params.logprobs) is None:
            return None
        others = {1 + number: Logprob(-float(number + 2), number + 2) for number in range(max(0, top - 1))}
        return [{token: Logprob(-0.5, 1, self._tokenizer.decode([token]))} | others for token in tokens]
