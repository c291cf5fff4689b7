"""A tokenizer of bytes, which knows every text, with a chat template and marks of one's choice."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<end>"
HERMES = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
THINKING = HERMES + "{% if enable_thinking is not false %}<think>{% else %}<think></think>{% endif %}"
LLAMA = HERMES.replace("tool_call>", "|python_tag|>")
WITHOUT_TOOLS = "{% for message in messages %}{{ message.content }}{% endfor %}"


def byte_tokenizer(chat_template: str, marks: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose `marks` are one token each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({text: number for number, text in enumerate([*alphabet, END])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, chat_template=chat_template)
    found.add_tokens([AddedToken(mark, special=False) for mark in marks])
    return found
