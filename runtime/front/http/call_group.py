"""Runs the calls of one request at the same time."""

from __future__ import annotations

import asyncio
import traceback
from types import TracebackType

from ....errors import PilotflameError


class CallGroup(asyncio.TaskGroup):
    """A task group that raises the first PilotflameError itself, in place of a group of errors.

    It also removes the reference cycle that asyncio's task group leaves: its frames refer to the error that they raise,
    and the error's traceback refers to these frames. With this cycle, the body of each failed or cancelled request
    would stay in memory until the garbage collector runs.
    """

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        first: BaseException | None = None
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
            traceback.clear_frames(failed.__traceback__)
            if not isinstance(first, PilotflameError):
                raise
            # The group still refers to its errors, so remove their tracebacks.
            for kept in failed.exceptions:
                kept.__traceback__ = None
            raise first.copied() from None
        except BaseException as left:
            traceback.clear_frames(left.__traceback__)
            raise
        finally:
            del error, trace, first
