"""Makes a language model from a snapshot, and answers requests with it. Handlers call `pilotflame.language_model`."""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

# Let the tokenizer start no threads, because they would not survive the fork of a worker.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..answer_text import MOST_BYTES, TextStream, token_text
from ..caller import CallOrigin, origin
from ..notes import note
from ..sampling.constraint import Constraint
from ..sampling.generation_defaults import GenerationDefaults, seeded
from ..sampling.prompt_logprobs import PromptLogprobs
from ..sampling.sampler import Logprobs, Sampler, TokenLimits
from ..sampling.sampling import Sampling
from .adapters import ModelAdapters, check_adapter
from .admission import NO_TARGETS, Targets
from .answer_form import AnswerForms
from .answer_parts import AnswerParts, add_text
from .causal_model import CausalModel, conversion_note, keep_float32
from .contract import Delta, FinishReason, GenerationRequest, TokenLogprob, TokenUsage
from .declared_prefixes import DeclaredPrefixes
from .engine import Engine
from .engine_steps import Token
from .prefix_builder import PrefixBuilder
from .prefixes import Prefixes
from .prompts import Prompts, check_prompt_logprobs, most_new_tokens

if TYPE_CHECKING:
    from ...snapshot.adapters import Adapters
    from ...snapshot.handle import Snapshot


T = TypeVar("T")
PLANNERS = 2
"""How many requests are turned into tokens at a time."""


@dataclass(frozen=True)
class _Plan:
    """A request with its prompt, its limit and the forms of its answers."""

    request: GenerationRequest
    ids: list[int]
    most_new: int
    usage: TokenUsage
    forms: list[tuple[Constraint | None, AnswerParts | None]]
    """The constraint and the reader of each answer."""
    sampling: Sampling
    """How the tokens of the first answer are chosen."""
    limits: TokenLimits
    targets: Targets
    origin: CallOrigin


class LanguageModel:
    """A causal model of transformers, its tokenizer, and the engine that runs many requests at once.

    It has no weights until a worker opens the snapshot.
    """

    def __init__(
        self, snapshot: Snapshot, *, rows: int, window: int, prefixes: Snapshot | DeclaredPrefixes | None = None,
        adapters: Adapters | None = None, most_adapters: int = 8, pinned: Collection[str] = (),
    ) -> None:  # fmt: skip
        """The snapshot is the folder of a model: config.json, tokenizer files, safetensors.

        At most `rows` sequences run together. Their number times the tokens of the longest one is at most `window`, which limits the memory of
        their keys and values. A single sequence has at most `window` tokens. `prefixes` are `context.prefixes`, or what
        `pilotflame snapshot prefixes` has written.

        `adapters` are `context.adapters`. At most `most_adapters` of them stay in the model while no sequence uses them: the least recently
        used leaves first, and the `pinned` never leave.
        """
        folder = Path(snapshot.path)
        with snapshot.skeleton():
            config = AutoConfig.from_pretrained(folder)
            if config.dtype is None:
                config.dtype = snapshot.dtype
            module = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
            keep_float32(module, config.dtype)
        # Cast to the type of config.json, as transformers does. Some or all tensors of a file may have another type.
        snapshot.restore(module, device="auto", cast=True)
        vocabulary = int(module.get_input_embeddings().num_embeddings)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._prompts = Prompts(self.tokenizer, vocabulary)
        # The executor starts its threads with the first request, in the worker.
        self._planners = ThreadPoolExecutor(PLANNERS, "planner")
        self._adapters = ModelAdapters(module, adapters, most_adapters, pinned) if adapters else None
        causal = CausalModel(module, config, self._adapters)
        self.causal = causal
        self.most_tokens = min(causal.most_tokens, window)
        self.prefixes = PrefixBuilder(snapshot, self._prompts, causal, self.most_tokens)
        stored = None
        if prefixes is not None and not isinstance(prefixes, DeclaredPrefixes):
            stored = Prefixes(prefixes)
            stored.read(self.prefixes.origin)
            # Do not wait for the stored tensors now: the engine waits when it needs them.
            stored.snapshot.gated = True
        snapshot.gated = True
        self.engine = Engine(causal, rows, window, stored, snapshot.gate)
        if causal.why_alone:
            note(f"The model answers one request at a time, because {causal.why_alone}.")
        if converted := conversion_note(snapshot.manifest, config.dtype):
            note(converted)
        self._defaults = GenerationDefaults(folder)
        self._ends = self._defaults.ends(config.eos_token_id, self.tokenizer.eos_token_id)
        self._forms = AnswerForms(self.tokenizer, self._prompts, self._ends)
        if isinstance(prefixes, DeclaredPrefixes):
            self.prefixes.declare(prefixes, self.engine)

    def rehearse(self) -> None:
        """Make a few tokens, so that the first request finds all kernels loaded. Call it in the hook `rehearse`."""
        self.engine.rehearse()
        self.tokenizer.decode(self.tokenizer.encode("Hello"))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta]:
        """Yield the pieces of the answers as they are made. The last piece of each answer says why it has ended.

        Raise InputInvalid if the request does not fit the model, and Overloaded if the answer would come later than the request allows.
        """
        if request.prompt_only:
            yield await self._planned(self._listed, request)
            return
        plan = await self._planned(self._plan, request)
        if self._adapters is not None and request.adapter is not None:
            await self._adapters.arrive(request.adapter)
        answers = self._answer(plan, 0) if request.n == 1 else self._answers(plan)
        async with aclosing(answers):
            async for delta in answers:
                yield delta

    async def _planned(self, plan: Callable[[GenerationRequest], T], request: GenerationRequest) -> T:
        """Run `plan` in one of PLANNERS threads. They are few, because each may have the tokens of a long text in memory."""
        planned = partial(contextvars.copy_context().run, plan, request)
        return await asyncio.get_running_loop().run_in_executor(self._planners, planned)

    def _listed(self, request: GenerationRequest) -> Delta:
        return self._prompts.listed(request, self.most_tokens)

    def _plan(self, request: GenerationRequest) -> _Plan:
        check_adapter(request.adapter, self._adapters.names if self._adapters is not None else [])
        prompt = self._prompts.prompt(request, self.most_tokens)
        most_new = most_new_tokens(request, len(prompt.ids), self.most_tokens)
        check_prompt_logprobs(request, len(prompt.ids))
        first = self._forms.constraint(request, prompt)
        constraints = [first.copy() if first is not None else None for _ in range(request.n)]
        forms = [(constraint, self._forms.parts(request, prompt)) for constraint in constraints]
        stored = None
        if request.prompt_logprobs is None:
            stored = self.engine.prefix(prompt.ids, request.adapter or "")
        usage = TokenUsage(
            prompt_tokens=len(prompt.ids), cached_tokens=len(stored.ids) if stored is not None else 0
        )
        sampling = self._defaults.sampling(request.sampling)
        limits = TokenLimits(sampling.allowed_token_ids, self._prompts.bad_words(request))
        return _Plan(
            request,
            prompt.ids,
            most_new,
            usage,
            forms,
            sampling,
            limits,
            _targets(request),
            origin.get(),
        )

    async def _answers(self, plan: _Plan) -> AsyncGenerator[Delta]:
        """Yield the pieces of several answers as they come."""
        pieces: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()

        async def run(index: int) -> None:
            try:
                async with aclosing(self._answer(plan, index)) as answer:
                    async for delta in answer:
                        pieces.put_nowait(delta)
                pieces.put_nowait(None)
            except Exception as error:  # noqa: BLE001  raised below
                pieces.put_nowait(error)

        # Not a task group: it would wrap the error, and a generator may not suspend inside of one.
        running = [asyncio.create_task(run(index)) for index in range(plan.request.n)]
        try:
            left = len(running)
            while left:
                found = await pieces.get()
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    left -= 1
                else:
                    yield found
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)

    async def _answer(self, plan: _Plan, index: int) -> AsyncGenerator[Delta]:
        request, ids, usage = plan.request, plan.ids, plan.usage
        constraint, parts = plan.forms[index]
        sampling = seeded(plan.sampling, index)
        ends = [*([] if sampling.ignore_eos else self._ends), *sampling.stop_token_ids]
        # Keep special tokens for the reader of calls, because the marks of calls may be special tokens.
        decode = self._decode if parts is None else self._decode_marks
        stream = TextStream(
            decode,
            request.stop,
            after=ids,
            with_stop=request.include_stop_str_in_output,
            least=sampling.min_tokens,
        )
        sampler = Sampler(sampling, ids, ends, constraint, plan.limits)
        # Only the first answer has targets. A later answer must not be refused after the first one has begun.
        targets = plan.targets if index == 0 else NO_TARGETS
        made, said, before = 0, list[str](), deque[int](maxlen=MOST_BYTES)
        written = list[int]()
        top = request.prompt_logprobs
        scored = PromptLogprobs(ids, top) if top is not None else None
        found = self.engine.generate(
            ids,
            sampler,
            ends,
            plan.most_new,
            plan.origin.rank(request.priority),
            targets,
            request.adapter or "",
            plan.origin.tenant,
            scored,
        )
        async with aclosing(found) as tokens:
            async for token in tokens:
                if not made and (request.echo or scored is not None):
                    yield await self._planned(partial(self._of_prompt, ids, index, scored), request)
                made += 1
                usage.completion_tokens += 1
                delta = Delta(index=index, tokens=[token.id], logprobs=self._logprobs(token, before))
                before.append(token.id)
                if made == 1:
                    delta.usage = usage
                add_text(delta, "" if token.ends else stream.push(token.id), parts)
                reason: FinishReason | None = "stop" if token.last or stream.stopped is not None else None
                if reason is None and made == plan.most_new:
                    reason = "length"
                if reason is not None:
                    add_text(delta, stream.finish(), parts, last=True)
                    called = parts is not None and parts.called and reason == "stop"
                    if reason == "stop" and (request.output is not None or request.must_call):
                        stop_token = token.id in sampling.stop_token_ids and token.id not in self._ends
                        cut = written if stop_token or stream.stopped is not None else None
                        text = "".join([*said, delta.text])
                        valid = called and parts is not None and parts.valid
                        check = partial(self._forms.check, text=text, called=valid, cut=cut)
                        await self._planned(check, request)
                    delta.finish_reason, delta.usage = "tool_calls" if called else reason, usage
                    delta.stop_reason = stream.stopped
                    if token.ends and token.id in sampling.stop_token_ids:
                        delta.stop_reason = token.id
                if request.output is not None:
                    said.append(delta.text)
                    written.append(token.id)
                yield delta
                if reason is not None:
                    return

    def _of_prompt(
        self, ids: list[int], index: int, scored: PromptLogprobs | None, request: GenerationRequest
    ) -> Delta:
        """Return the piece of an answer that shows its prompt."""
        logprobs = None
        if scored is not None:
            tokens = [Token(ids[0], Logprobs(0.0, ()), False, False)]
            tokens += [
                Token(token, of, False, False) for token, of in zip(ids[1:], scored.taken(), strict=True)
            ]
            found = [
                self._logprobs(token, ids[max(0, at - MOST_BYTES) : at]) for at, token in enumerate(tokens)
            ]
            logprobs = [one for of in found for one in of or ()]
        return Delta(index=index, text=self._decode(ids) if request.echo else "", prompt_logprobs=logprobs)

    def _logprobs(self, token: Token, before: Sequence[int]) -> list[TokenLogprob] | None:
        if (found := token.logprobs) is None:
            return None

        def text(token_id: int) -> str:
            return token_text(self._decode_marks, [*before], token_id)

        top = [(text(other), other, value) for other, value in found.top]
        return [
            TokenLogprob(token=text(token.id), id=token.id, logprob=found.chosen, top=top, rank=found.rank)
        ]

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _decode_marks(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


def _targets(request: GenerationRequest) -> Targets:
    """Return the caller's targets, by the engine's clock."""
    by, token_ms = request.first_token_by, request.token_ms
    return Targets(
        math.inf if by is None else time.monotonic() + by - time.time(),
        math.inf if token_ms is None else token_ms / 1000,
    )
