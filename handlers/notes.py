"""Collects what a function's deployer should know, and only `build` finds out. The status of the function shows it."""

from __future__ import annotations

NOTES: list[str] = []
"""The notes of this process. A process builds one function."""


def note(text: str) -> None:
    """Add a sentence to the warnings of the function that this process builds."""
    NOTES.append(text)
