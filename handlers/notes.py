"""Collects warnings for a function's deployer that only `build` can find. The status of the function shows them."""

from __future__ import annotations

NOTES: list[str] = []
"""The notes of this process. A process builds one function."""


def note(text: str) -> None:
    """Add a sentence to the warnings of the function that this process builds."""
    NOTES.append(text)
