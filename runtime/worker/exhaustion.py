"""Exhaustion: whether an exception says that memory ran out, the processor's or a device's."""

from __future__ import annotations

SAID = ("out of memory", "can't allocate memory")
REMEDY = (
    "This input alone needs more memory than there is: send a smaller one, or give the function more memory."
)


def exhausted(error: BaseException) -> bool:
    """Known by name and text: torch is imported by those who use it, not here."""
    if isinstance(error, MemoryError):
        return True
    if any(
        kind.__name__ == "OutOfMemoryError" and kind.__module__.startswith("torch")
        for kind in type(error).__mro__
    ):
        return True
    if not isinstance(error, RuntimeError):
        return False
    try:
        text = str(error).lower()
    except Exception:  # noqa: BLE001  a broken __str__ says nothing of memory
        return False
    return any(words in text for words in SAID)
