"""The text of a recording, from a Hugging Face speech model: Whisper and its kin, or a model with CTC such as wav2vec 2.0.

The snapshot is the model's folder: config.json, tokenizer and preprocessor files, safetensors. An event is the bytes
of a WAV file (16 bits), or JSON with the same bytes in base64.
"""

import base64
import io
import os
import wave
from pathlib import Path
from typing import Any

# The tokenizer's threads would not survive the fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pilotflame
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import (
    AutoConfig,
    AutoModelForCTC,
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
    GenerationConfig,
)


class Transcriber:
    """A processor and its model. The model has no weights until `restore`."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        config = AutoConfig.from_pretrained(folder)
        # As in transformers: the type that config.json names, else that of the weights.
        config.dtype = config.dtype or dtype
        self.processor = AutoProcessor.from_pretrained(folder)
        self.rate: int = self.processor.feature_extractor.sampling_rate
        self.with_ctc = config.architectures[0].endswith("ForCTC")
        kind = AutoModelForCTC if self.with_ctc else AutoModelForSpeechSeq2Seq
        self.model = kind.from_config(config).eval()
        if (folder / "generation_config.json").is_file():
            self.model.generation_config = GenerationConfig.from_pretrained(folder)

    @torch.inference_mode()
    def transcribe(self, sound: Tensor) -> str:
        given = self.processor(sound.numpy(), sampling_rate=self.rate, return_tensors="pt")
        inputs = given.to(self.model.device, self.model.dtype)
        ids = self.model(**inputs).logits.argmax(-1) if self.with_ctc else self.model.generate(**inputs)
        return str(self.processor.batch_decode(ids, skip_special_tokens=True)[0]).strip()


def build(context: pilotflame.Context) -> Transcriber:
    """Runs once per revision: make everything but the weights, which each worker maps when it starts."""
    with context.snapshot.skeleton():
        transcriber = Transcriber(context.snapshot.path, context.snapshot.dtype)
    # "auto": on a GPU if there is one, otherwise mapped.
    context.snapshot.restore(transcriber.model, cast=True, device="auto")
    return transcriber


def handler(event: Any, context: pilotflame.Context) -> dict[str, str]:
    return {"text": context.state.transcribe(decode(event, context.state.rate))}


def decode(event: Any, rate: int) -> Tensor:
    """Return the samples of an event, of one channel and -1 to 1, at `rate` a second. Raise TypeError or ValueError."""
    if not isinstance(event, bytes):
        if not isinstance(event, dict) or not isinstance(event.get("audio"), str):
            raise TypeError('Send the bytes of a WAV file, or {"audio": "<the bytes in base64>"}.')
        event = base64.b64decode(event["audio"], validate=True)
    try:
        with wave.open(io.BytesIO(event)) as file:
            channels, bits, given, frames = (
                file.getnchannels(),
                8 * file.getsampwidth(),
                file.getframerate(),
                file.readframes(-1),
            )
    except (wave.Error, EOFError) as error:
        raise ValueError(
            f"The event is no WAV file: {error}. Convert it: ffmpeg -i INPUT -ac 1 OUTPUT.wav"
        ) from None
    if bits != 16 or not frames:
        raise ValueError(
            f"The WAV file has {len(frames)} bytes of samples of {bits} bits; send some of 16 bits."
        )
    sound = (
        torch.frombuffer(bytearray(frames), dtype=torch.int16).reshape(-1, channels).float().mean(1) / 32768
    )
    if given == rate:
        return sound
    return interpolate(sound[None, None], size=max(1, len(sound) * rate // given), mode="linear")[0, 0]
