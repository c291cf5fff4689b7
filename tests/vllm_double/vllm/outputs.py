from dataclasses import dataclass
from typing import Any


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: Any
    cumulative_logprob: float | None
    logprobs: Any
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestOutput:
    def __init__(
        self, request_id, prompt, prompt_token_ids, prompt_logprobs, outputs, finished, num_cached_tokens=None
    ):
        self.request_id, self.prompt_token_ids = request_id, prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs, self.finished, self.num_cached_tokens = outputs, finished, num_cached_tokens
