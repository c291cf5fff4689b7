"""Tiny models of transformers with random weights, in folders as the hub has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

WORDS = ["[PAD]", "[UNK]", "a", "pilot", "flame", "burns", "the", "sea", "is", "calm", "."]
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": len(WORDS),
    "max_position_embeddings": 64,
}  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, "[UNK]")
    )
    made.normalizer = tokenizers.normalizers.Lowercase()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)


def write_bert(folder: Path, kind: str, **config: Any) -> Path:
    """Write a BERT with a head: `kind` is the name of its class."""
    torch.manual_seed(7)
    getattr(transformers, kind)(transformers.BertConfig(**(SIZES | config))).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def labels(*names: str) -> dict[str, Any]:
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }


def write_sentence_transformer(folder: Path, pooling: str) -> Path:
    write_bert(folder, "BertModel")
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"idx": n, "type": f"sentence_transformers.models.{kind}"} for n, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return folder


def write_vit(folder: Path) -> Path:
    torch.manual_seed(7)
    sizes = {
        name: size for name, size in SIZES.items() if name not in ("vocab_size", "max_position_embeddings")
    }
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, **labels("cat", "dog", "owl"))
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def write_wav2vec(folder: Path) -> Path:
    torch.manual_seed(7)
    folder.mkdir(exist_ok=True)
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", "a", "b", "c"]
    (folder / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate(letters)}))
    config = transformers.Wav2Vec2Config(
        **(SIZES | {"vocab_size": len(letters)}), conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 8),
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, pad_token_id=0,
    )  # fmt: skip
    transformers.Wav2Vec2ForCTC(config).save_pretrained(folder)
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    transformers.Wav2Vec2Processor(
        feature_extractor=transformers.Wav2Vec2FeatureExtractor(), tokenizer=tokenizer
    ).save_pretrained(folder)
    return folder


def write_whisper(folder: Path) -> Path:
    torch.manual_seed(7)
    write_tokenizer(folder)
    config = transformers.WhisperConfig(
        vocab_size=len(WORDS), num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=1500,
        max_target_positions=16, pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=2,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=8).save_pretrained(folder)
    return folder


STORED_TYPES = ("float32", "bfloat16", "float16", "bfloat16 with float32")


def retype(folder: Path, said: str | None, stored: str) -> Path:
    """Give the weights in a folder the type `stored`. `said` is the type in config.json, or None for no type.

    With "… with float32", the weights of norms keep float32.
    """
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps({**config, **({"dtype": said} if said else {})}))
    dtype = getattr(torch, stored.split(" ", maxsplit=1)[0])
    tensors = load_file(folder / "model.safetensors")
    norms = ("norm", "ln_")
    kept = (
        {name for name in tensors if any(norm in name.lower() for norm in norms)} if "with" in stored else ()
    )
    cast = {name: tensor if name in kept else tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(cast, folder / "model.safetensors", {"format": "pt"})
    return folder
