"""What the answers of a request have to look like: their grammar, and how their text is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...errors import InputInvalid, OutputInvalid
from ..sampling.constraint import Constraint, Constraints
from ..sampling.grammar import OutputFormat, lark_of, output_rules
from .answer_parts import AnswerParts
from .chat_form import THINK, THOUGHT, ChatForm, call_rules, with_reasoning
from .contract import GenerationRequest
from .prompts import Prompt, Prompts

_UNFINISHED = "The answer has ended without the format that the request asks for."
_AGAIN = "Send the request again, without stop strings and with a simpler schema."


class AnswerForms:
    """Makes the forms of one model's answers."""

    def __init__(self, tokenizer: Any, prompts: Prompts, ends: Sequence[int] | None) -> None:
        """`ends` are the tokens that end an answer. None: another engine compiles the grammars, so there are no constraints."""
        self._tokenizer = tokenizer
        self._chat = ChatForm.of(tokenizer.chat_template, getattr(tokenizer, "response_template", None))
        marks = [
            THINK,
            THOUGHT,
            *((*self._chat.tools.begin, *self._chat.tools.end) if self._chat.tools else ()),
        ]
        self._tokens = prompts.single_tokens(marks)
        # Make the table of all tokens in `build`, so that all workers share it. It takes half a second for a large vocabulary.
        self._constraints, self._why_none = (None, "") if ends is None else _constraints(tokenizer, ends)

    def constraint(self, request: GenerationRequest, prompt: Prompt) -> Constraint | None:
        """Return the constraint of an answer; None if it may be any text. Raise InputInvalid."""
        if (grammar := self.grammar(request, prompt)) is None:
            return None
        if self._constraints is None:
            raise InputInvalid(
                f"This function can have neither tools nor output formats: {self._why_none}.",
                remedy="Add llguidance to its requirements.txt, and use a model with a fast tokenizer.",
            )
        for schema in (
            request.output and request.output.json_schema,
            *(one.parameters for one in request.callable_tools),
        ):
            self._constraints.check_properties(schema or {})
        return self._constraints.new(grammar)

    def check(
        self, request: GenerationRequest, text: str, *, called: bool, cut: Sequence[int] | None = None
    ) -> None:
        """Raise OutputInvalid if an answer that has ended is not what the request asks for, for example because a stop string has cut it.

        `cut` has the tokens of an answer that a stop string or stop token has ended. None: the answer has kept its pattern or
        grammar to the end.
        """
        check_answer(request, text, called=called)
        output = request.output
        if cut is None or self._constraints is None or output is None:
            return
        # Check no text that does not show all bytes and tokens of the answer.
        if "\ufffd" in text or not self._unseen.isdisjoint(cut):
            return
        if output.grammar is not None or output.regex is not None:
            grammar = _alone(output)
            # Also try the text without the spaces at its beginning, which may belong to the reasoning.
            if not any(self._constraints.accepts(grammar, one) for one in (text, text.lstrip())):
                raise OutputInvalid(_UNFINISHED, remedy=_AGAIN)

    @property
    def _unseen(self) -> set[int]:
        """The special tokens, which a text leaves out, except the marks of reasoning."""
        marks: list[int] = self._tokenizer.convert_tokens_to_ids(sorted(self._tokens & {THINK, THOUGHT}))
        return {*self._tokenizer.all_special_ids} - {*marks}

    def parts(self, request: GenerationRequest, prompt: Prompt) -> AnswerParts | None:
        """Return the reader of an answer; None if all of it is text. Raise InputInvalid."""
        tools = bool(request.callable_tools)
        template = self._chat.template(tools=tools) if request.messages is not None else None
        if template is None:
            return None
        if not hasattr(self._tokenizer, "get_response_parser"):
            if not tools:
                return None
            raise InputInvalid(
                "Tools need a newer version of transformers.", remedy="Install transformers 5.13 or later."
            )
        declared = self._chat.declared is not None
        before = prompt.text if declared else THINK if _begun(prompt) else ""
        listed = [tool.model_dump(exclude_none=True) for tool in request.tools]
        parser = self._tokenizer.get_response_parser(template, prefix=before, tools=listed or None)
        return AnswerParts(parser, self._chat.tools.arguments if self._chat.tools else None)

    def grammar(self, request: GenerationRequest, prompt: Prompt) -> str | None:
        """Return the grammar of an answer, in the Lark form of llguidance; None if it may be any text. Raise InputInvalid."""
        if request.output is not None:
            if request.output.grammar is not None:
                return _alone(request.output)
            rules = output_rules(request.output)
        elif request.callable_tools:
            if (found := self._calls(request)) is None:
                return None
            rules = found
        else:
            return None
        if request.messages is None or not self._chat.thinks:
            return f"start: answer\n{rules}"
        return with_reasoning(rules, self._tokens, begun=_begun(prompt))

    def _calls(self, request: GenerationRequest) -> str | None:
        """Return the rules of calls; None if the model may write any text. Raise InputInvalid."""
        form, must = self._chat.tools, request.must_call
        if not must and not self._chat.shows_tools:
            raise InputInvalid(
                "The model's chat template does not show tools to the model.",
                remedy='Set tool_choice to "required" or to a tool: then each answer is a call.',
            )
        if not must and self._chat.unread:
            raise InputInvalid(
                f"The calls of this model begin with {self._chat.unread}, and cannot be read.",
                remedy='Set tool_choice to "required" or to a tool: then a grammar gives each call another form.',
            )
        if form is None:
            if must:
                raise InputInvalid(
                    "No grammar is known for the calls of this model, so none can be required.",
                    remedy='Set tool_choice to "auto".',
                )
            return None
        strict = any(tool.strict for tool in request.callable_tools)
        marked = not form.begin or form.begin[0] in self._tokens
        if not must and not (strict and marked):
            return None
        tools, several = request.callable_tools, request.parallel_tool_calls
        return call_rules(tools, form, self._tokens, several=several, must=must)


def check_answer(request: GenerationRequest, text: str, *, called: bool) -> None:
    """Raise OutputInvalid if an answer that has ended is not what the request asks for, for example because a stop string has cut it."""
    asked, fits = request.output, True
    if asked is not None and asked.json_schema is not None:
        try:
            # Keep whole numbers as text, because a number may have more digits than Python converts.
            json.loads(text, parse_int=str)
        except RecursionError:
            pass
        except ValueError:
            fits = False
    elif asked is not None and asked.choice is not None:
        fits = text.strip() in {choice.strip() for choice in asked.choice}
    elif request.must_call and not called:
        raise OutputInvalid("The answer is no call of a tool, which tool_choice requires.", remedy=_AGAIN)
    if not fits:
        raise OutputInvalid(_UNFINISHED, remedy=_AGAIN)


def _alone(output: OutputFormat) -> str:
    """Return the grammar of an answer in this format, without reasoning."""
    return lark_of(output.grammar) if output.grammar is not None else f"start: answer\n{output_rules(output)}"


def _constraints(tokenizer: Any, ends: Sequence[int]) -> tuple[Constraints | None, str]:
    """Return the Constraints and ""; or None and the reason."""
    try:
        return Constraints(tokenizer, ends), ""
    except (ImportError, ValueError) as error:
        return None, str(error)


def _begun(prompt: Prompt) -> bool:
    """Return True if the chat template has begun the reasoning."""
    return prompt.text.rstrip().endswith(THINK)
