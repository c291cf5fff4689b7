"""Speech to text with a model that a package brings: a WAV file in (16 kHz, one channel, 16 bits), the words out."""

import io
import wave

import pilotflame
from pocketsphinx import Decoder

RATE = 16_000


def setup(context: pilotflame.Context) -> Decoder:
    """Runs once per worker. The decoder reads its acoustic model and its dictionary here."""
    return Decoder(samprate=RATE, loglevel="FATAL")


def handler(event: bytes, context: pilotflame.Context) -> dict[str, str]:
    with wave.open(io.BytesIO(event)) as sound:
        if (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) != (RATE, 1, 2):
            raise ValueError("The sound must have 16 kHz, one channel and 16 bits.")
        samples = sound.readframes(sound.getnframes())
    decoder: Decoder = context.state
    decoder.start_utt()
    decoder.process_raw(samples, full_utt=True)
    decoder.end_utt()
    found = decoder.hyp()
    return {"text": found.hypstr if found else ""}
