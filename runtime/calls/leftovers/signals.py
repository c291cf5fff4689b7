"""Who handles which signal: the gateway's processes some of them, the function's code all of them as in a process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

from ..link.worker_spec import OF_GATEWAY

Handler = Callable[[int, FrameType | None], object] | int | None
# What a program has at its start. These are the signals whose handling zygotes and workers change.
_OF_PROGRAMS: dict[signal.Signals, Handler] = {
    signal.SIGCHLD: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler,
}  # fmt: skip


def ignore(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal by doing nothing.

    A signal that is ignored stays ignored in the programs that a handler starts. A signal with a handler does not.
    """


def reset() -> None:
    """Undo what the parent of this process does with signals. Signals for the gateway do nothing."""
    signal.set_wakeup_fd(-1)
    for number in _OF_PROGRAMS:
        signal.signal(number, ignore if number in OF_GATEWAY else signal.SIG_DFL)


class AuthorsHandlers:
    """The signal handlers that the import and the build of a handler set. A zygote sets its own, and workers set these."""

    def __init__(self) -> None:
        """Make it before the import."""
        self._before = {number: signal.getsignal(number) for number in _OF_PROGRAMS}
        self._found: dict[signal.Signals, Handler] = {}

    def note(self) -> None:
        """Find the handlers after the build, and leave SIGTERM to the zygote."""
        handlers = {number: signal.getsignal(number) for number in _OF_PROGRAMS}
        self._found = {
            number: one for number, one in handlers.items() if one not in (None, self._before[number])
        }
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def restore(self) -> None:
        """Set the handlers in a worker."""
        for number, handler in self._found.items():
            signal.signal(number, handler)


def keep_authors(set_own: Callable[[], object]) -> Handler:
    """Call `set_own`, which sets this worker's own handler of SIGTERM, and return that. A handler of the function's code stays."""
    authors = signal.getsignal(signal.SIGTERM)
    set_own()
    own = signal.getsignal(signal.SIGTERM)
    if authors not in (None, signal.SIG_DFL):
        signal.signal(signal.SIGTERM, authors)
    return own


def leave_to_forks(on_term: Handler, close: Callable[[], None]) -> None:
    """Let the processes that the function's code forks handle signals as a program does. `close` is called in each of them.

    `on_term` is this worker's own handler of SIGTERM. The handlers of the function's code stay.
    """

    def leave() -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in _OF_PROGRAMS.items():
            if signal.getsignal(number) in (ignore, on_term):
                signal.signal(number, handler)
        close()

    os.register_at_fork(after_in_child=leave)
