"""Jobs whose input is a request of OpenAI's API, as RunPod's worker-vllm takes them: `{"openai_route": ..., "openai_input": ...}`.

The function gets a `GenerationRequest`, as at the route itself. Its deltas are stored. Responses show them as worker-vllm's output: a
list with the answer, or with the texts of the events of its stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from ....errors import BadInput, InputInvalid, OutputInvalid, UnknownFunction
from ....foreign_json import excess
from ....handlers.language_model.contract import GenerationRequest
from ...front.api.backend import Backend
from ...front.generation.deltas import delta_of
from ...front.generation.models import generator, takes
from ...front.http.requests import in_turn, plain, validate
from ...jobs.stored.job import Job
from ...jobs.stored.job_store import JobStore
from ...node.functions.live import Live
from ..completions.answers import CompletionAnswer
from ..completions.requests import REMEDY, ChatRequest, CompletionRequest, StreamOptions, supported

FIELDS = {"openai_route", "openai_input"}
CHAT = "/v1/chat/completions"
ROUTES: Mapping[str, type[ChatRequest] | type[CompletionRequest]] = {
    CHAT: ChatRequest,
    "/v1/completions": CompletionRequest,
}
MOST_READ = 1000
"""The most pieces that are read from the store at once."""
FORM = "openai_job"
"""The form of webhooks of such jobs, and the key under which `Job.extra` has the request's fields that the answer needs."""


def is_openai(live: Live, given: Any) -> bool:
    """Return True if a job's input is a request of OpenAI's API for a language model. Other handlers get such an input as it is."""
    return isinstance(given, dict) and bool(FIELDS & given.keys()) and takes(live, GenerationRequest)


def event_of(
    backend: Backend, request: web.Request, live: Live, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the event of a job, and its `extra`. Raise InputInvalid with the field's name if the input is invalid."""
    name, route = live.record.function, given.get("openai_route") or CHAT
    if (kind := ROUTES.get(str(route).removeprefix("/openai"))) is None:
        remedy = f"Use one of {', '.join(ROUTES)}. Other routes are at /v2/{name}/openai/v1."
        raise _invalid("openai_route", f"no job has the route {route!r:.80}.", remedy)
    if not isinstance(body := given.get("openai_input"), dict):
        raise _invalid("openai_input", "it is no object.", "Send the body of the request.")
    try:
        asked = validate(kind, {"model": name} | supported(body), REMEDY)
        asked.check()
        events = asked.events()
        writes = generator(backend, request, asked.model if asked.model.startswith(f"{name}:") else name)
    except (BadInput, UnknownFunction) as error:
        field, text = str(error.details.get("field", "")), error.message.removeprefix("The body is invalid: ")
        raise _invalid(f"openai_input.{field}", text.removeprefix(f"{field}: "), error.remedy) from error
    if len(events) > 1:
        raise _invalid("openai_input.prompt", "a job has one prompt.", "Send a job for each prompt.")
    event = plain(writes.event(events[0]))
    kept = {"model", "n", "stream", "stream_options"}
    return event, {FORM: {"chat": kind is ChatRequest, **asked.model_dump(mode="json", include=kept)}}


def _invalid(field: str, problem: str, remedy: str) -> InputInvalid:
    message = f"The body is invalid: input.{field}: {problem}"
    return InputInvalid(message, remedy=remedy, details={"field": f"input.{field}"})


class OpenAiOutput:
    """The output of one job in worker-vllm's form. It grows with each delta."""

    def __init__(self, job: Job, kept: Mapping[str, Any]) -> None:
        """`kept` is what `event_of` has put into the job's `extra`."""
        options = StreamOptions(**kept["stream_options"])
        fields = {"model": kept["model"], "n": kept["n"], "stream_options": options}
        # Do not validate the request again: it was valid when the job was submitted, and its prompt was not kept.
        asked, prefix = (
            (ChatRequest.model_construct(**fields), "chatcmpl")
            if kept["chat"]
            else (CompletionRequest.model_construct(**fields), "cmpl")
        )
        self.streams, self.attempts = bool(kept["stream"]), job.attempts
        self.read = 0
        """The number of the last piece that `numbered` has read."""
        self._answer = CompletionAnswer(f"{prefix}-{job.id}", asked, int(job.created_s))
        self._function, self._running = job.function, int(kept["n"])

    def precedes(self, job: Job, after: int) -> bool:
        """Return True if the output can continue with the pieces after number `after`: it has read none of them, and no
        piece of an earlier attempt of the job.
        """
        return self.read <= after and self.attempts == job.attempts

    def numbered(self, pieces: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        """Yield the text of the events of each delta, as JSON. The last delta's text ends the stream. Without a stream, yield nothing."""
        for number, piece in pieces if self.streams else ():
            self.read = number
            delta = delta_of(self._function, piece)
            text = self._answer.piece(0, delta)
            if delta.finish_reason is not None:
                self._running -= 1
                text += b"" if self._running else self._answer.end()
            if text:
                yield number, orjson.dumps(text.decode())

    def whole(self, pieces: Sequence[bytes]) -> bytes:
        """Return the output of a job that has completed, as JSON: a list."""
        if self.streams:
            return b"[" + b",".join(text for _, text in self.numbered(enumerate(pieces))) + b"]"
        for piece in pieces:
            self._answer.add(0, delta_of(self._function, piece))
        return orjson.dumps([self._answer.whole()])


def output_of(job: Job) -> OpenAiOutput | None:
    """Return the output of a job with a request of OpenAI's API, without deltas yet; None for any other job."""
    kept = (job.extra or {}).get(FORM)
    return OpenAiOutput(job, kept) if isinstance(kept, dict) else None


def in_form(job: Job) -> Job:
    """Return a job with worker-vllm's output if its input is a request of OpenAI's API. Blocks while it parses the output.

    An output that has no deltas stays as it is.
    """
    if not job.output or job.output_type or excess(job.output) or (found := output_of(job)) is None:
        return job
    stored = orjson.loads(job.output)
    pieces = [orjson.dumps(piece) for piece in (stored if isinstance(stored, list) else [stored])]
    try:
        return replace(job, output=found.whole(pieces))
    except OutputInvalid:
        return job


async def read_in_form(request: web.Request, job: Job) -> Job:
    """Return the result of `in_form`, which a thread computes in the turn of the request's caller."""
    return job if output_of(job) is None else await in_turn(request, partial(in_form, job))


async def read_until(
    request: web.Request, store: JobStore, job: Job, output: OpenAiOutput, after: int
) -> None:
    """Let an output read the pieces up to number `after`, because the texts of later pieces depend on them."""
    while output.streams and output.read < after:
        if not (found := await store.pieces(job.id, output.read, min(MOST_READ, after - output.read))):
            return
        await in_turn(request, partial(_read, output, found))


def _read(output: OpenAiOutput, pieces: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    return [*output.numbered(pieces)]


async def pieces_of(
    request: web.Request, store: JobStore, job: Job, output: OpenAiOutput | None, after: int, most: int
) -> list[tuple[int, bytes]]:
    """Return the numbers and the JSON of the pieces of a job's output after piece number `after`, at most `most`.

    `output` is the result of `output_of`. It may have read pieces before, but none after number `after`.
    """
    if output is None:
        return await store.pieces(job.id, after, most)
    if output.streams:
        await read_until(request, store, job, output, after)
        found = await store.pieces(job.id, output.read, most)
        numbered = await in_turn(request, partial(_read, output, found))
        return [(number, text) for number, text in numbered if number > after]
    # Without a stream, the answer is one piece, which exists once the job has completed.
    number, whole = max(1, job.pieces), (await read_in_form(request, job)).output
    return [(number, whole[1:-1])] if job.state.final and whole and after < number else []
