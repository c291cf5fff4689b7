"""Defines the requests of TGI's API, and turns each of them into the event for a function.

An unsupported parameter that would change the answer is refused, and the error names it.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ....errors import BadInput
from ....handlers.language_model.contract import GenerationRequest
from ....handlers.sampling.sampling import MOST_TOP
from ...front.http.requests import validate
from ..completions.requests import GrammarType

MOST_STOPS = 16
REMEDY = "docs/language-models.md lists the parameters."
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "typical_p": (1.0,), "watermark": (False,), "decoder_input_details": (False,),
}  # fmt: skip
"""The unsupported parameters that would change the answer, each with the values that ask for nothing and are accepted."""
_MAX_SEED = (1 << 64) - 1


class GenerateParameters(BaseModel):
    """How an answer is made. Without `do_sample` and the parameters of sampling, each token is the likeliest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    do_sample: bool = False
    temperature: float | None = Field(None, gt=0, le=2)
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=0, le=_MAX_SEED)
    max_new_tokens: int | None = Field(None, ge=1, description="None: as many tokens as there is room for.")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, max_length=MOST_STOPS)
    return_full_text: bool = Field(False, description="Begin the text with the prompt.")
    details: bool = False
    top_n_tokens: int | None = Field(None, ge=0, le=MOST_TOP)
    grammar: GrammarType | None = None
    truncate: int | None = Field(
        None, ge=1, description="Keep only this many tokens of the prompt, the last ones."
    )
    adapter_id: str | None = Field(None, description="The adapter that answers, by its name.")

    @property
    def samples(self) -> bool:
        """True if tokens are drawn. As in TGI, a temperature other than 1, top_k or top_p imply do_sample."""
        narrowed = self.top_k is not None or self.top_p not in (None, 1)
        return self.do_sample or narrowed or self.temperature not in (None, 1)


class GenerateRequest(BaseModel):
    """The body of a request for text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: str = Field(min_length=1, description="The prompt.")
    parameters: GenerateParameters = GenerateParameters()
    stream: bool = Field(False, description="Only for the route without `generate`; the others ignore it.")

    def new_seed(self) -> int | None:
        """Return the seed of the request, or else a random one. Return None if no token is drawn."""
        asked = self.parameters
        if not asked.samples:
            return None
        return secrets.randbits(64) if asked.seed is None else asked.seed

    def event(self, seed: int | None, *, stream: bool) -> GenerationRequest:
        """Return the event that the function gets. A stream has the logprob of each token."""
        asked = self.parameters
        fields: dict[str, Any] = {
            "max_tokens": asked.max_new_tokens, "repetition_penalty": asked.repetition_penalty or 1.0,
            "frequency_penalty": asked.frequency_penalty, "output": asked.grammar.output if asked.grammar else None,
            "top_logprobs": (asked.top_n_tokens or 0) if stream or asked.details else None, "temperature": 0.0,
        }  # fmt: skip
        if asked.truncate:
            fields["truncate_prompt_tokens"] = asked.truncate
        if asked.adapter_id:
            fields["adapter"] = asked.adapter_id
        if seed is not None:
            fields |= {
                "temperature": asked.temperature or 1.0,
                "top_k": asked.top_k or 0,
                "top_p": asked.top_p or 1.0,
            }
            # Convert the seed, because the seeds of events are signed.
            fields["seed"] = seed - _MAX_SEED - 1 if seed > _MAX_SEED // 2 else seed
        if asked.stop:
            # In TGI, the text of an answer has the stop text at its end.
            fields |= {"stop": asked.stop, "include_stop_str_in_output": True}
        given = {name: value for name, value in fields.items() if value is not None}
        return validate(GenerationRequest, {"prompt": self.inputs, **given}, REMEDY)


def supported(body: Any) -> Any:
    """Return a request without the parameters that are null or ask for nothing. Raise BadInput if an unsupported one asks for something."""
    if not isinstance(body, dict):
        return body
    body = {name: value for name, value in body.items() if value is not None}
    if not isinstance(parameters := body.get("parameters"), dict):
        return body
    given = {name: value for name, value in parameters.items() if value is not None}
    for name in sorted(UNSUPPORTED.keys() & given.keys()):
        if given.pop(name) not in UNSUPPORTED[name]:
            field = f"parameters.{name}"
            message = f"The body is invalid: {field}: pilotflame does not support it yet."
            raise BadInput(message, remedy=REMEDY, details={"field": field})
    return {**body, "parameters": given}
