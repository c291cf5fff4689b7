"""Turns requests into what vLLM gets: the tokens of a prompt, and sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputInvalid
from ..language_model.answer_form import AnswerForms
from ..language_model.contract import GenerationRequest
from ..language_model.prompts import Prompts, most_new_tokens
from ..sampling.generation_defaults import GenerationDefaults
from ..sampling.sampling import Sampling
from .answers import VllmAnswers

FIELDS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty", "logit_bias": "logit_bias", "seed": "seed", "top_logprobs": "logprobs",
    "min_tokens": "min_tokens", "ignore_eos": "ignore_eos", "stop_token_ids": "stop_token_ids",
    "allowed_token_ids": "allowed_token_ids", "bad_words": "bad_words",
}  # fmt: skip
"""The fields of `Sampling`, and their names in vLLM."""
REFUSED = ("first_token_by", "token_ms")
"""The fields of a request that have no effect in vLLM. A request that sets one of them is refused."""
# Seeds are reduced modulo this number, because vLLM takes -1 for no seed, and adds the number of the answer to the seed.
_SEEDS = 1 << 62


@dataclass(frozen=True)
class VllmRequest:
    """A request as vLLM gets it, with its SamplingParams, and the reader of its answers."""

    ids: list[int]
    params: Any
    answers: VllmAnswers


class VllmRequests:
    """Makes the requests for one model. The tokenizer is transformers', so that prompts and tools are as with our own engine."""

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        """`folder` is the folder of the model."""
        self._tokenizer = tokenizer
        self._prompts = Prompts(tokenizer, len(tokenizer))
        self.listed = self._prompts.listed
        self._forms = AnswerForms(tokenizer, self._prompts, None)
        self._defaults = GenerationDefaults(folder)

    def make(self, request: GenerationRequest, most_tokens: int) -> VllmRequest:
        """Make a request for vLLM, for which a sequence has at most `most_tokens`. Raise InputInvalid if it does not fit the model."""
        refuse_missing(request)
        prompt = self._prompts.prompt(request, most_tokens)
        most_new = most_new_tokens(request, len(prompt.ids), most_tokens)
        parts = [self._forms.parts(request, prompt) for _ in range(request.n)]
        sampling = self._defaults.sampling(request.sampling)
        grammar = self._forms.grammar(request, prompt)
        # If answers are parsed, keep special tokens, because the marks of calls may be special tokens.
        params = sampling_params(request, sampling, most_new, grammar, marks=parts[0] is not None)
        echoed = self._tokenizer.decode(prompt.ids, skip_special_tokens=True) if request.echo else ""
        answers = VllmAnswers(
            parts, len(prompt.ids), sampling.top_logprobs, self._decode, request, echoed=echoed
        )
        return VllmRequest(prompt.ids, params, answers)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def sampling_params(
    request: GenerationRequest, sampling: Sampling, most_new: int, grammar: str | None, *, marks: bool
) -> Any:
    """Return vLLM's SamplingParams for all answers of a request. `sampling` has the model's defaults.

    `grammar` is in the Lark form of llguidance. With `marks`, the text has special tokens too. Raise
    VLLMClientError if vLLM does not take a value.
    """
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams  # noqa: PLC0415

    given: dict[str, Any] = {theirs: getattr(sampling, ours) for ours, theirs in FIELDS.items()}
    given["bad_words"] = list(sampling.bad_words)
    given["allowed_token_ids"] = None if (allowed := sampling.allowed_token_ids) is None else list(allowed)
    given["logit_bias"] = dict(sampling.logit_bias) or None
    given["stop_token_ids"] = list(sampling.stop_token_ids)
    if request.n > 1 and not sampling.temperature:
        # vLLM refuses several answers at temperature 0. So let it draw from the one likeliest token.
        given |= {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
    given["seed"] = None if sampling.seed is None else sampling.seed % _SEEDS
    return SamplingParams(
        **given, n=request.n, max_tokens=most_new, stop=request.stop,
        include_stop_str_in_output=request.include_stop_str_in_output, skip_special_tokens=not marks,
        prompt_logprobs=request.prompt_logprobs, output_kind=RequestOutputKind.DELTA,
        structured_outputs=None if grammar is None else StructuredOutputsParams(grammar=grammar),
    )  # fmt: skip


def refuse_missing(request: GenerationRequest) -> None:
    """Raise InputInvalid if the request sets a field that has no effect in vLLM."""
    for name in REFUSED:
        if getattr(request, name) is not None:
            raise InputInvalid(
                f"{name} has no effect on this model: vLLM does not predict the times of tokens.",
                remedy=f"Leave {name} out, and the header that sets it (x-slo-ttft-ms, x-slo-tpot-ms).",
            )
