"""Train a tiny llama to know one text by heart, and write it to weights/. Run it once: python make_weights.py"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "A pilot flame lets the burner start at once. Ein Flämmchen genügt: 火 🔥"
END = "<end>"
STEPS = 150


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes. It knows every text, and a character may be several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({text: number for number, text in enumerate([*alphabet, END])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    chat = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, chat_template=chat)


def train(ids: list[int], end: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    # More threads would slow down a model this small.
    torch.set_num_threads(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=end + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=end, pad_token_id=None,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = torch.tensor([[*ids, end]])
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
    print(f"loss after {STEPS} steps: {loss.item():.4f}")
    return model


if __name__ == "__main__":
    folder = Path(__file__).parent / "weights"
    made = tokenizer()
    train(made(TEXT).input_ids, made.eos_token_id).save_pretrained(folder)
    made.save_pretrained(folder)
    print(f"wrote {folder}")
