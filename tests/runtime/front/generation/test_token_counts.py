"""Tokens count in usage and against the limit of an API key, by whichever route a language model is called."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from live import Gateway, failure, gateway_here, home_client, short_folder
from pilotflame.errors import HandlerFailed
from pilotflame.handlers.language_model.contract import MOST_ANSWERS, GenerationRequest
from pilotflame.runtime.calls.serving.invocation import Invocation, Output
from pilotflame.runtime.front.generation.token_counts import (
    END_BYTES,
    PARSED_BYTES,
    AnswerTokens,
    ModelCalls,
    _asked,
)
from pilotflame.runtime.ground.access.keyring import Meter

pytestmark = pytest.mark.asyncio(loop_scope="module")
# `handler` yields the deltas in the prompt, which is JSON. `whole` returns the first delta.
SCRIPTED = """
import json
from pilotflame import Delta, GenerationRequest

def handler(event: GenerationRequest):
    for delta in json.loads(event.prompt):
        yield Delta(**delta)

def whole(event: GenerationRequest) -> Delta:
    return Delta(**json.loads(event.prompt)[0])
"""
DELTAS = [
    {"text": "a", "tokens": [1, 2], "usage": {"prompt_tokens": 5, "cached_tokens": 3}},
    {"text": "b", "tokens": [3]},
    {"finish_reason": "stop", "usage": {"prompt_tokens": 5, "cached_tokens": 3, "completion_tokens": 4}},
]
COUNTED = {"prompt_tokens": 5, "cached_tokens": 3, "generated_tokens": 4}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scripted() -> AsyncIterator[Gateway]:
    with short_folder() as folder:
        async with gateway_here(folder / "state") as gateway:
            yield gateway


async def used(gateway: Gateway, name: str) -> dict[str, int]:
    async with home_client(gateway.state) as home:
        rows = (await home.get("/v1/usage")).json()["rows"]
    found = {row["key"]: row["usage"] for row in rows}.get(name, {})
    return {key: found.get(key, 0) for key in COUNTED}


@pytest.mark.parametrize("route", ["invoke", "job", "completions"])
async def test_tokens_of_every_route_count_once(scripted: Gateway, route: str) -> None:
    name, event = f"by-{route}", {"prompt": json.dumps(DELTAS)}
    await scripted.deploy(SCRIPTED, name=name)
    if route == "invoke":
        answer = await scripted.client.post(f"/invoke/{name}", json=event)
    elif route == "job":
        answer = await scripted.client.post(f"/v2/{name}/runsync", json={"input": event})
    else:
        answer = await scripted.client.post("/v1/completions", json={"model": name, **event})
    assert answer.status_code == 200, answer.text
    assert await used(scripted, name) == COUNTED


async def test_tokens_of_a_handler_that_returns_one_piece_count(scripted: Gateway) -> None:
    await scripted.deploy(SCRIPTED, {"handler": "handler.py:whole"}, name="whole")
    answer = await scripted.client.post("/invoke/whole", json={"prompt": json.dumps(DELTAS)})
    assert answer.json()["text"] == "a"
    assert await used(scripted, "whole") == {"prompt_tokens": 5, "cached_tokens": 3, "generated_tokens": 2}


async def test_other_functions_are_not_read(scripted: Gateway) -> None:
    source = "def handler(event):\n    yield {'tokens': [1, 2], 'usage': {'prompt_tokens': 5}}\n"
    await scripted.deploy(source, name="other")
    assert (await scripted.client.post("/invoke/other", json=1)).status_code == 200
    assert sum((await used(scripted, "other")).values()) == 0


async def test_a_key_that_has_used_its_tokens_waits() -> None:
    with short_folder() as folder:
        async with gateway_here(folder / "state") as gateway:
            await gateway.deploy(SCRIPTED, name="model")
            async with home_client(gateway.state) as home:
                made = [
                    (await home.post("/v1/keys", json={"name": name, **limits})).json()["key"]
                    for name, limits in (("small", {"model_tokens_per_min": 5}), ("other", {}))
                ]
            small, other = [{"Authorization": f"Bearer {key}"} for key in made]
            event = {"prompt": json.dumps(DELTAS)}
            first = await gateway.client.post("/invoke/model", json=event, headers=small)
            assert first.status_code == 200, first.text
            refused = await gateway.client.post(
                "/v1/completions", json={"model": "model", **event}, headers=small
            )
            assert refused.status_code == 429
            # The key has used 9 of its 5 tokens, and gets 5 tokens a minute. It waits until its bucket is full, because a full bucket
            # admits any prompt.
            assert 30 <= int(refused.headers["Retry-After"]) <= 120
            assert "model_tokens_per_min" in refused.text
            assert (
                failure(await gateway.client.post("/invoke/model", json=event, headers=small))["status"]
                == 429
            )
            assert (await gateway.client.post("/invoke/model", json=event, headers=other)).status_code == 200


class Tally:
    """Stands in for an `Account`, and adds up the tokens."""

    def __init__(self) -> None:
        self.prompt = self.cached = self.generated = 0

    def note_tokens(self, *, prompt: int, cached: int = 0, generated: int = 0) -> None:
        self.prompt, self.cached, self.generated = (
            self.prompt + prompt,
            self.cached + cached,
            self.generated + generated,
        )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["tokens", "usage", "prompt_tokens", "completion_tokens"]), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@given(st.lists(JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=8), max_size=6))
async def test_any_pieces_are_counted_or_ignored(pieces: list[bytes]) -> None:
    tally = Tally()
    account: Any = tally
    tokens = AnswerTokens(account)
    for piece in pieces:
        tokens.note(piece)
    assert min(tally.prompt, tally.cached, tally.generated, 0) == 0
    assert tokens.used == tally.prompt + tally.generated


class OneKey:
    """A keyring that has the same meter for every owner."""

    def __init__(self, meter: Meter) -> None:
        self.meter = lambda _owner: meter


ENDS = ["output", "error", "caller gone", "refused", "never accepted"]


@given(st.lists(st.tuples(st.sampled_from(ENDS), st.booleans(), st.integers(1, 9)), max_size=8))
async def test_a_reservation_is_settled_once_at_every_end(calls: list[tuple[str, bool, int]]) -> None:
    meter = Meter(None, None, 1_000, 0.0, 1_000)
    bucket = meter._model_tokens
    assert bucket is not None
    account, keyring = cast("Any", Tally()), cast("Any", OneKey(meter))
    model, now_s = ModelCalls(account, keyring), 0.0
    for end, streams, answers in calls:
        bucket.level, used = bucket.most, 0
        body = json.dumps({"prompt": "abcd", "n": answers}).encode()
        invocation = Invocation("i", body, now_s=now_s, deadline_s=9.0, hold_until_s=9.0, streaming=streams)
        model.observe(invocation)
        assert meter.running == answers - 1
        if streams and end != "never accepted":
            stream = invocation.stream
            assert stream is not None
            stream.put(json.dumps(DELTAS[0]).encode())
            used = 7
        if end == "output":
            invocation.end(Output(json.dumps(DELTAS[0]).encode(), "application/json"))
            used = 7
        elif end in ("refused", "never accepted"):
            invocation.output.cancel()
        else:
            invocation.end(HandlerFailed("no") if end == "error" else None)
            invocation.end(HandlerFailed("again"))
        await asyncio.sleep(0)
        assert (meter.running, bucket.level) == (0, bucket.most - used)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def limited() -> AsyncIterator[tuple[Gateway, dict[str, dict[str, str]]]]:
    """Yield a gateway and the headers of each key. A key admits four requests at once, and later one in 1,000 seconds."""
    with short_folder() as folder:
        async with gateway_here(folder / "state") as gateway:
            await gateway.deploy(SCRIPTED, name="model")
            async with home_client(gateway.state) as home:
                limits = {"rate_per_s": 0.001, "burst": 4}
                made = {
                    name: (await home.post("/v1/keys", json={"name": name, **limits})).json()["key"]
                    for name in ("answers", "prompts", "events", "jobs")
                }
            yield gateway, {name: {"Authorization": f"Bearer {key}"} for name, key in made.items()}


LONG = "x" * (PARSED_BYTES + 1)


@given(
    n=st.integers(1, 128).flatmap(lambda n: st.sampled_from([n, str(n), f" {n}", float(n), f"+{n}"])),
    most=st.none() | st.integers(1, 9999).flatmap(lambda most: st.sampled_from([most, str(most)])),
)
async def test_a_call_asks_for_what_the_handler_reads(n: object, most: object) -> None:
    event = {"prompt": "x", "n": n} | ({} if most is None else {"max_tokens": most})
    read, asked = GenerationRequest.model_validate(event), _asked(json.dumps(event).encode())
    assert asked.answers == read.n
    assert asked.most == (read.max_tokens or float("inf"))
    # A longer body is not parsed. Regular expressions search in it, and must not match inside its strings.
    assert _asked(json.dumps({**event, "prompt": LONG}).encode()).answers == read.n
    assert _asked(json.dumps({"prompt": LONG + '"n": 9'}).encode()).answers == 1


@pytest.mark.parametrize("way", ["answers", "prompts", "events"])
async def test_several_in_one_request_count_as_several(
    limited: tuple[Gateway, dict[str, dict[str, str]]], way: str
) -> None:
    gateway, keys = limited
    prompt, headers = json.dumps(DELTAS), keys[way]

    async def ask() -> Any:
        if way == "answers":
            return await gateway.client.post(
                "/invoke/model", json={"prompt": prompt, "n": 3}, headers=headers
            )
        if way == "prompts":
            asked = {"model": "model", "prompt": [prompt] * 3}
            return await gateway.client.post("/v1/completions", json=asked, headers=headers)
        events = [
            {"specversion": "1.0", "id": str(number), "source": "s", "type": "t", "data": {"prompt": prompt}}
            for number in range(3)
        ]
        kind = {"Content-Type": "application/cloudevents-batch+json", **headers}
        return await gateway.client.post("/v2/model/run", content=json.dumps(events), headers=kind)

    first, refused = await ask(), await ask()
    assert first.status_code in (200, 202), first.text
    assert refused.status_code == 429
    assert "rate_per_s" in refused.text
    # One request of the four is left, and the second `ask` needs three. A request that counts as one is admitted.
    assert 1900 <= int(refused.headers["Retry-After"]) <= 2100
    one = await gateway.client.post("/invoke/model", json={"prompt": prompt}, headers=headers)
    assert one.status_code == 200, one.text


@pytest.mark.parametrize("text", ["", "x" * 100_000, '"tokens":[1,2],"usage":{"prompt_tokens":9}' * 5000])
@pytest.mark.parametrize("tokens", [[], [7], [1, 22, 333]])
async def test_the_tokens_of_a_large_piece_are_counted_without_parsing_it(
    text: str, tokens: list[int]
) -> None:
    tally = Tally()
    account: Any = tally
    usage = {"prompt_tokens": 5, "cached_tokens": 2, "completion_tokens": len(tokens)}
    AnswerTokens(account).note(json.dumps({"text": text, "tokens": tokens, "usage": usage}).encode())
    assert (tally.prompt, tally.cached, tally.generated) == (5, 2, len(tokens))


@pytest.mark.parametrize("blanks", [b" " * 1_000_000, b'"' + b" " * 1_000_000])
async def test_blanks_in_a_body_take_no_longer_than_their_number(blanks: bytes) -> None:
    """If two adjacent parts of a pattern matched the same blanks, a search in a million blanks would take days."""
    assert _asked(b'{"n":' + blanks + b"null}").answers == 1


async def test_the_ends_of_a_long_body_and_of_a_long_output_are_searched() -> None:
    middle = b'"' * 4 * END_BYTES
    assert _asked(b'{"n": 3, "prompt": "' + middle).answers == 3
    assert _asked(b'{"prompt": "' + middle + b'", "n": 4}').answers == 4
    tally = Tally()
    AnswerTokens(tally).note_input(middle + b'"tokens": 7}')  # type: ignore[arg-type]
    AnswerTokens(tally).note(b'{"tokens": [1, 2], "text": "' + middle + b'"}')  # type: ignore[arg-type]
    assert (tally.prompt, tally.generated) == (7, 2)


async def test_a_body_with_very_many_numbers_of_answers_counts_for_the_most() -> None:
    assert _asked(b'"n":1,' * 100_000).answers == MOST_ANSWERS
