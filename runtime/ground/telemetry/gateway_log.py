"""Configures the standard library's logging for the gateway: its own messages go to standard error and a file.

Modules log with `logging.getLogger(__name__)`. A thread writes to standard error, because the reader of standard
error may be slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from logging.handlers import QueueHandler, QueueListener
from typing import Any, Literal, TextIO

from .log_files import GATEWAY, LogLine, printable
from .logs import OWN_SOURCES, LogChannel, Logs

LOG = logging.getLogger(__name__)
Format = Literal["text", "json", "collector"]
Level = Literal["debug", "info", "warning", "error"]
# The loggers with the gateway's level. asyncio logs exceptions of callbacks, and aiohttp exceptions of its own handlers.
_OWN = __name__.partition(".")[0]
LOGGERS = (_OWN, "asyncio", "aiohttp.server", "aiohttp.web")
MAX_WAITING = 10_000
STOP_TIMEOUT_S = 2.0


class MessageFormatter(logging.Formatter):
    """Formats a message as `time LEVEL pilotflame: text`, in UTC. With a format other than "text", formats it as a line of
    JSON, like the lines of the log files.

    A message may be logged with `extra={"request_id": ID}`. Then JSON has the id in its own field, and in the text form,
    `text` begins with `[ID]`.
    """

    def __init__(self, form: Format) -> None:
        super().__init__("%(asctime)sZ %(levelname)s pilotflame: %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime
        self._as_json = form != "text"

    def format(self, record: logging.LogRecord) -> str:
        if self._as_json:
            return line_of(record).encode().decode().rstrip("\n")
        return printable(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the library's name
        record.message = _message(record)
        if request_id := record.__dict__.get("request_id", ""):
            record.message = f"[{request_id}] {record.message}"
        return super().formatMessage(record)


class ChannelHandler(logging.Handler):
    """Writes messages of any thread to the gateway's log, on the event loop's thread."""

    def __init__(self, channel: LogChannel) -> None:
        super().__init__()
        self._channel, self._loop = channel, asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        line = line_of(record)
        # RuntimeError means that the event loop has ended. Then the log's file is closed, too.
        with contextlib.suppress(RuntimeError):
            write = functools.partial(self._channel.write, request_id=line.request_id)
            self._loop.call_soon_threadsafe(write, line.source, line.text, line.level)


class _LossyOutput(logging.StreamHandler[TextIO]):
    """Prints messages, and drops messages that the operating system does not accept."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        super().__init__(stream)
        self.setFormatter(formatter)
        self._called = "standard error" if stream is sys.stderr else "standard output"
        self._dropped = itertools.count(1)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the library's name
        if isinstance(sys.exc_info()[1], OSError):
            self.drop()
        else:
            super().handleError(record)

    def drop(self) -> None:
        """Count a dropped message, and log the 1st, the 10th, the 100th and so on: the output may drop this message, too."""
        if str(count := next(self._dropped)).rstrip("0") == "1":
            LOG.warning("%s: lines were dropped (%d): its reader is too slow or gone", self._called, count)


class _LossyHandler(QueueHandler):
    """Hands messages to the thread that writes them. Messages are dropped while the thread is too slow."""

    def __init__(self, waiting: queue.SimpleQueue[logging.LogRecord], output: _LossyOutput) -> None:
        super().__init__(waiting)
        self._waiting, self._output = waiting, output

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        # The library's method formats the message here, which would lose the level and the traceback.
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put(record)
        else:
            self._output.drop()


class _Printer(QueueListener):
    """The thread that writes messages to the output."""

    def stop(self) -> None:
        """Write the waiting messages, unless the reader of the output is too slow."""
        self.enqueue_sentinel()
        if (thread := self._thread) is not None:
            thread.join(STOP_TIMEOUT_S)
        self._thread = None


@contextlib.contextmanager
def gateway_logging(logs: Logs, level: Level, form: Format) -> Iterator[None]:
    """Send messages of `level` and above to standard error and to the gateway's log, until the block ends.

    The root logger has the handlers, so messages of libraries also go there. Messages below WARNING of loggers that are not in LOGGERS are
    dropped.
    """
    root, loggers = logging.getLogger(), [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, logger.level) for logger in (root, *loggers)]
    with _printing(sys.stderr, MessageFormatter(form)) as printer, _hooks():
        handlers = (printer, ChannelHandler(logs.channel(GATEWAY)))
        for logger in loggers:
            logger.setLevel(level.upper())
        root.setLevel(max(logging.WARNING, loggers[0].level))
        for handler in handlers:
            handler.addFilter(_is_wanted)
            root.addHandler(handler)
        logging.captureWarnings(capture=True)
        try:
            yield
        finally:
            logging.captureWarnings(capture=False)
            for handler in handlers:
                root.removeHandler(handler)
            for logger, old_level in before:
                logger.setLevel(old_level)


@contextlib.contextmanager
def collected(logs: Logs) -> Iterator[None]:
    """Print each new line of a function, of the audit log and of the access log on standard output, too, until the block ends."""

    class LineFormatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            line: LogLine = record.__dict__["line"]
            return line.encode("function" if line.function else record.__dict__["log"]).decode().rstrip("\n")

    with _printing(sys.stdout, LineFormatter()) as printer:

        def show(log: str, line: LogLine) -> None:
            if log != GATEWAY:
                printer.handle(logging.makeLogRecord({"log": log, "line": line}))

        logs.kept.append(show)
        try:
            yield
        finally:
            logs.kept.remove(show)


async def print_log(channel: LogChannel, form: Format) -> None:
    """Print each new line of a function's log on standard output, until this is cancelled.

    In the form "text", a line is exactly what the function has printed, because platforms read JSON in such lines.
    """
    with _printing(sys.stdout, logging.Formatter()) as printer, channel.subscribe() as news:
        try:
            while (line := await news.get()) is not None:
                _print_line(printer, line, form)
        finally:
            while not news.empty():
                if (line := news.get_nowait()) is not None:
                    _print_line(printer, line, form)


def _print_line(printer: logging.Handler, line: LogLine, form: Format) -> None:
    request = f"[{line.request_id}] " if line.request_id else ""
    text = f"{line.source} | {request}{line.text}" if line.source in OWN_SOURCES else line.text
    if form == "json":
        text = line.encode().decode().rstrip("\n")
    printer.handle(logging.makeLogRecord({"msg": text}))


@contextlib.contextmanager
def _printing(stream: TextIO, formatter: logging.Formatter) -> Iterator[logging.Handler]:
    """Yield a handler whose records a thread prints on `stream`."""
    output = _LossyOutput(stream, formatter)
    # Not `queue.Queue`: a finaliser that runs inside its `put` may log, and would wait for ever for the lock of the queue.
    waiting: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    listener = _Printer(waiting, output)
    listener.start()
    try:
        yield _LossyHandler(waiting, output)
    finally:
        listener.stop()


def line_of(record: logging.LogRecord) -> LogLine:
    """Return a message as a line of the gateway's log, with its traceback if it has one."""
    text = _message(record)
    if record.exc_info:
        text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
    level = "error" if record.levelno >= logging.ERROR else record.levelname.lower()
    return LogLine(record.created, "gateway", text, level, request_id=record.__dict__.get("request_id", ""))


def _message(record: logging.LogRecord) -> str:
    """Return the text of a message. The text of a library's message begins with the name of its logger."""
    own = record.name.partition(".")[0] in (_OWN, "root")
    return record.getMessage() if own else f"{record.name}: {record.getMessage()}"


def _is_wanted(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name.startswith(LOGGERS)


@contextlib.contextmanager
def _hooks() -> Iterator[None]:
    """Inside the block, log what Python would print itself: errors that end a thread, and errors of finalisers."""

    def told(what: str) -> Callable[[Any], None]:
        def tell(error: Any) -> None:
            LOG.error(what, exc_info=(error.exc_type, error.exc_value, error.exc_traceback))

        return tell

    # Keep hooks that another program has set, such as pytest.
    found = threading.excepthook, sys.unraisablehook
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = told("a thread has failed")
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = told("an error cannot be raised")
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = found
