"""A prompt that is too long is refused before all of it is turned into tokens."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import InputInvalid
from pilotflame.foreign_json import excess
from pilotflame.handlers.language_model.contract import Delta, GenerationRequest, TokenLogprob
from pilotflame.handlers.language_model.prompts import (
    CHARS_A_TOKEN,
    MOST_VALUES,
    Prompts,
    check_prompt_logprobs,
)
from pilotflame.runtime.front.generation.deltas import MOST_BYTES, VALUE_BYTES
from tiny_tokenizer import WITHOUT_TOOLS, byte_tokenizer
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

MOST = 100
LONG = "a long token of the model" * 4


class Counting:
    """A tokenizer that counts the characters that it has read. It has one token of 100 characters."""

    def __init__(self) -> None:
        self._tokenizer: Any = byte_tokenizer(WITHOUT_TOOLS)
        self._tokenizer.add_tokens([AddedToken(LONG, special=False)])
        self.read = 0

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.read += len(text)
        found: list[int] = self._tokenizer.encode(text, **options)
        return found


@pytest.fixture
def tokenizer() -> Counting:
    return Counting()


@pytest.fixture
def prompts(tokenizer: Counting) -> Prompts:
    return Prompts(tokenizer, len(tokenizer))


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("text", ["x" * 1_000_000, "x" * 9_000, LONG * 60 + "x" * 3_000])
def test_a_long_prompt_is_refused_by_its_beginning(
    prompts: Prompts, tokenizer: Counting, text: str, chat: bool
) -> None:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    with pytest.raises(
        InputInvalid, match=f"maximum context length is {MOST} tokens: the prompt is too long"
    ):
        prompts.prompt(GenerationRequest(**given), MOST)
    assert tokenizer.read <= len(LONG) * MOST


def test_a_prompt_of_long_tokens_fits(prompts: Prompts) -> None:
    assert len(prompts.prompt(GenerationRequest(prompt=LONG * MOST), MOST).ids) == MOST


@given(
    st.lists(st.sampled_from(["x", "ä", " ", LONG, LONG[:50]]), min_size=1, max_size=60), st.integers(1, 80)
)
def test_no_prompt_that_fits_is_refused(parts: list[str], most: int) -> None:
    tokenizer = byte_tokenizer(WITHOUT_TOOLS)
    tokenizer.add_tokens([AddedToken(LONG, special=False)])
    text = "".join(parts)
    ids = tokenizer.encode(text)
    if len(ids) <= most:
        assert Prompts(tokenizer, len(tokenizer)).prompt(GenerationRequest(prompt=text), most).ids == ids


def test_tokens_and_messages_are_counted(prompts: Prompts, tokenizer: Counting) -> None:
    assert len(prompts.prompt(GenerationRequest(prompt=[1] * MOST), MOST).ids) == MOST
    messages: list[dict[str, Any]] = [{"role": "user", "content": ""}] * (MOST + 1)
    for asked in (GenerationRequest(prompt=[1] * (MOST + 1)), GenerationRequest(messages=messages)):
        with pytest.raises(InputInvalid, match="the prompt is too long"):
            prompts.prompt(asked, MOST)
    assert tokenizer.read == 0


@pytest.mark.parametrize("token", [-1, 10_000])
def test_a_bias_of_no_token_is_refused(prompts: Prompts, token: int) -> None:
    """As in vLLM, which ignores such tokens in stop_token_ids."""
    with pytest.raises(InputInvalid, match=f"logit_bias names the token {token}") as caught:
        prompts.prompt(GenerationRequest(prompt="a", logit_bias={1: 1.0, token: 1.0}), MOST)
    assert caught.value.details == {"field": "logit_bias"}
    assert prompts.prompt(GenerationRequest(prompt="a", stop_token_ids=(10_000,)), MOST).ids


def test_a_permission_of_no_token_is_refused(prompts: Prompts) -> None:
    with pytest.raises(InputInvalid, match="allowed_token_ids names the token 100000") as caught:
        prompts.prompt(GenerationRequest(prompt="a", allowed_token_ids=(1, 100_000)), 10)
    assert caught.value.details["field"] == "allowed_token_ids"


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "efg"), ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 30}, "abcdefg"), ({"truncate_prompt_tokens": -1}, "bcdefg"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 5, "truncation_side": "right"}, "ab"),
    ],
)  # fmt: skip
def test_a_part_of_a_prompt(prompts: Prompts, tokenizer: Counting, fields: dict[str, Any], kept: str) -> None:
    ids = tokenizer.encode("abcdefg")
    messages = [{"role": "user", "content": "abcdefg"}]
    for asked in ({"prompt": "abcdefg"}, {"prompt": ids}, {"messages": messages}):
        assert tokenizer.decode(prompts.prompt(GenerationRequest(**asked, **fields), 7).ids) == kept


def test_a_long_prompt_of_which_a_part_is_kept_is_not_read_as_a_whole(
    prompts: Prompts, tokenizer: Counting
) -> None:
    text = "x" * 1_000_000 + "end"
    found = prompts.prompt(GenerationRequest(prompt=text, truncate_prompt_tokens=5), MOST)
    assert tokenizer.decode(found.ids) == "xxend"
    assert tokenizer.read <= 6 * len(LONG)
    with pytest.raises(InputInvalid, match="maximum context length"):
        prompts.prompt(GenerationRequest(prompt=text, truncate_prompt_tokens=MOST + 1), MOST)


@pytest.mark.parametrize("tokens", [-1, MOST + 1, 10**9])
def test_the_tokens_to_keep_do_not_change_how_much_is_read(
    prompts: Prompts, tokenizer: Counting, tokens: int
) -> None:
    kept: dict[str, Any] = {"truncate_prompt_tokens": tokens}
    with suppress(InputInvalid):
        prompts.prompt(GenerationRequest(prompt="x" * 1_000_000, **kept), MOST)
    assert tokenizer.read <= (MOST + 2) * len(LONG)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}] * (MOST + 1)
    with pytest.raises(InputInvalid, match="the prompt is too long"):
        prompts.prompt(GenerationRequest(messages=messages, **kept), MOST)


def test_the_beginning_of_a_prompt_is_kept_with_its_last_tokens(tokenizer: Counting) -> None:
    tokenizer._tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer._tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    prompts = Prompts(tokenizer, len(tokenizer))
    found = prompts.prompt(GenerationRequest(prompt="abcdefg", truncate_prompt_tokens=3), 9).ids
    assert tokenizer.decode(found) == "<s>fg"


def test_a_bad_word_also_has_its_tokens_after_a_space() -> None:
    tokenizer = byte_tokenizer(WITHOUT_TOOLS)
    tokenizer.add_tokens([AddedToken("war", special=False), AddedToken(" war", special=False)])
    words, number = Prompts(tokenizer, len(tokenizer)).bad_words, tokenizer.get_vocab()
    for word in ("war", " war"):
        found = words(GenerationRequest(prompt="a", bad_words=(word,)))
        assert found == [[number["war"]], [number[" war"]]]
    # The form with a space before the word is not forbidden, because it has one token more.
    assert words(GenerationRequest(prompt="a", bad_words=("it",))) == [[number["i"], number["t"]]]
    assert words(GenerationRequest(prompt="a", bad_words=(" ",))) == []


def test_the_parts_of_a_text_are_as_long_as_the_longest_prompt(prompts: Prompts, tokenizer: Counting) -> None:
    text = LONG * (2 * CHARS_A_TOKEN)
    assert prompts.prompt(GenerationRequest(prompt=text), MOST).ids
    assert tokenizer.read == 2 * len(text)


def test_the_tokens_of_a_prompt_without_an_answer(prompts: Prompts, tokenizer: Counting) -> None:
    found = prompts.listed(GenerationRequest(prompt="Hé", prompt_only=True), MOST)
    assert found.prompt is not None
    assert found.prompt.ids == tokenizer.encode("Hé")
    assert (found.prompt.text, found.prompt.most, len(found.prompt.pieces)) == (
        "Hé",
        MOST,
        len(found.prompt.ids),
    )
    assert (found.finish_reason, found.text, found.tokens) == ("length", "", [])


def test_special_tokens_and_the_beginning_of_an_answer(tokenizer: Counting) -> None:
    tokenizer._tokenizer.chat_template = "{{ messages[0].content }}{% if add_generation_prompt %}!{% endif %}"
    tokenizer._tokenizer.add_bos_token = True
    prompts = Prompts(tokenizer, len(tokenizer))
    chat: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    for asked, wanted in ((True, "Hi!"), (False, "Hi")):
        assert (
            prompts.prompt(GenerationRequest(messages=chat, add_generation_prompt=asked), MOST).text == wanted
        )
    sent: list[bool] = []
    tokenizer.encode = lambda text, **options: sent.append(options["add_special_tokens"]) or [1]  # type: ignore[method-assign, func-returns-value]
    for fields in ({}, {"add_special_tokens": False}):
        prompts.prompt(GenerationRequest(prompt="a", **fields), MOST)
    for fields in ({}, {"add_special_tokens": True}):
        prompts.prompt(GenerationRequest(messages=chat, **fields), MOST)
    assert sent == [True, False, False, True]


@pytest.mark.parametrize("parameters", [None, {}, {"properties": {}}])
def test_a_tool_without_parameters_takes_an_empty_object(tokenizer: Counting, parameters: Any) -> None:
    """Many templates read the properties of the parameters."""
    tokenizer._tokenizer.chat_template = "{% for t in tools %}{{ t.function.parameters | tojson }}{{ t.function.parameters.properties | length }}{% endfor %}"
    tool = {"function": {"name": "clock", "parameters": parameters}}
    asked = GenerationRequest.model_validate(
        {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}
    )
    found = Prompts(tokenizer, len(tokenizer)).prompt(asked, MOST).text
    assert found == '{"type": "object", "properties": {}}0'


PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
TEXTS_OR_PARTS = "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}PARTS{% endif %}{% endfor %}"
FIRST_PART = "{% for m in messages %}[{{ m.role }}]{{ m.content[0].text if m.role == 'user' else m.content }}{% endfor %}"
TURNS = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?"), ("tool", "7"), ("user", "Why?")]


@pytest.mark.parametrize(
    "template", [PARTS, TEXTS_OR_PARTS, FIRST_PART, WITHOUT_TOOLS.replace("{{ m", "[{{ message.role }}]{{ m")]
)
def test_a_template_gets_texts_or_parts_as_it_reads_them(tokenizer: Counting, template: str) -> None:
    tokenizer._tokenizer.chat_template = template
    messages = [{"role": role, "content": content} for role, content in TURNS]
    asked = GenerationRequest.model_validate({"messages": messages})
    found = Prompts(tokenizer, len(tokenizer)).prompt(asked, MOST).text
    assert found == "".join(f"[{role}]{content}" for role, content in TURNS)


def test_the_logprobs_of_a_prompt_are_limited_and_sent_once() -> None:
    most = MOST_VALUES // 26
    check_prompt_logprobs(GenerationRequest(prompt="a", prompt_logprobs=20), most)
    check_prompt_logprobs(GenerationRequest(prompt="a", n=128), MOST_VALUES)
    for count, n, text in ((most + 1, 1, f"a prompt of {most} tokens at most"), (2, 2, "n 1 only")):
        with pytest.raises(InputInvalid, match=text) as caught:
            check_prompt_logprobs(GenerationRequest(prompt="a", prompt_logprobs=20, n=n), count)
        assert caught.value.details == {"field": "prompt_logprobs"}


@pytest.mark.parametrize("top", [0, 1, 20])
def test_the_largest_logprobs_of_a_prompt_stay_below_the_limits_of_answers(top: int) -> None:
    likeliest = [(" antidisestablish", 100_000, -10.123456789)] * top
    one = TokenLogprob(token=" antidisestablish", id=100_000, logprob=-10.123456789, top=likeliest, rank=1)
    delta = Delta(prompt_logprobs=[one] * (MOST_VALUES // (6 + top)))
    piece = delta.model_dump_json()
    assert not excess(piece)
    assert len(piece) + VALUE_BYTES * (1 + piece.count(",")) < MOST_BYTES
