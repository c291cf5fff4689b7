"""Reports the progress of a deploy: the function that it creates or updates, and the duration of each step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import datetime

from pydantic import BaseModel, Field

from .revision_record import RevisionRecord

LOCAL = "local"


class Replaced(BaseModel, frozen=True):
    """The live revision that a deploy replaces."""

    revision: str
    number: int
    created_at: datetime
    deployed_by: str = Field(
        description='"key NAME", or "local": a caller on the gateway\'s machine without a key.'
    )

    @classmethod
    def of(cls, record: RevisionRecord) -> Replaced:
        key = record.deployer or record.deployed_by
        return cls(
            revision=record.revision, number=record.number, created_at=record.created_at,
            deployed_by=f"key {key}" if key else LOCAL,
        )  # fmt: skip


class DeployTarget(BaseModel, frozen=True):
    """The function that a deploy changes. If `replaces` is None, the deploy creates the function."""

    name: str
    replaces: Replaced | None


class DeployStep(BaseModel, frozen=True):
    """A step of a deploy. While it runs, `seconds` is None."""

    name: str
    seconds: float | None = None


class DeployNote(BaseModel, frozen=True):
    """A line about the step that runs, such as where a slow import is."""

    text: str


class DeployProgress:
    """The target and the steps of one deploy. Methods may be called from any thread, one at a time.

    Each change calls `tell`, in the thread that makes the change.
    """

    def __init__(
        self, tell: Callable[[DeployTarget | DeployStep | DeployNote], None] = lambda _change: None
    ) -> None:
        self.target: DeployTarget | None = None
        self.steps: list[DeployStep] = []
        """The steps that have ended."""
        self._tell = tell

    def note_target(self, name: str, replaced: RevisionRecord | None) -> None:
        """Report which function the deploy changes. Do nothing if the last call has reported the same."""
        target = DeployTarget(name=name, replaces=Replaced.of(replaced) if replaced is not None else None)
        if target != self.target:
            self.target = target
            self._tell(target)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure the block as a step. If the block raises, the end of the step is not reported."""
        began_s = time.monotonic()
        self.begin(name)
        yield
        self.add(name, time.monotonic() - began_s)

    def note(self, text: str) -> None:
        """Report a line about the step that runs."""
        self._tell(DeployNote(text=text))

    def begin(self, name: str) -> None:
        """Report that a step has begun. Call `add` when the step has ended."""
        self._tell(DeployStep(name=name))

    def add(self, name: str, seconds: float) -> None:
        """Add a step that has ended to `steps`, and report it."""
        step = DeployStep(name=name, seconds=round(seconds, 3))
        self.steps.append(step)
        self._tell(step)
