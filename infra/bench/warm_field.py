"""All contestants with one handler, up at the same time so that rounds can be interleaved; but only one of them runs.

Some contestants use the processor even without requests (LitServe's loop and Ray's daemons poll). So all processes of a
contestant are stopped (SIGSTOP) until its turn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from urllib.parse import urlsplit

from pilotflame.runtime.commands import minilm
from report import Report
from servers import ServerError
from warm_peers import HEADERS, Choice, Contender, start

_SETTLE_S = 0.2


class WrongAnswer(Exception):
    """A contestant's answer is not what the handler computes: its figures mean nothing."""


@contextmanager
def field(handler: str, choices: dict[str, Choice], report: Report) -> Iterator[dict[str, Contender]]:
    """Start, check and warm up each contestant, and stop it until its turn. The report names a contestant that cannot start."""
    with ExitStack() as stack:
        entered: dict[str, Contender] = {}
        for name, choice in choices.items():
            try:
                contender = stack.enter_context(start(choice, handler))
            except ServerError as error:
                report.note(f"{handler}: {name} is out: {str(error)[-300:]}")
                continue
            check(contender)
            contender.warm_up()
            contender.server.pause()
            entered[name] = contender
        yield entered


@contextmanager
def turn(contender: Contender) -> Iterator[Contender]:
    """Let this contestant run during the block, while all others stay stopped."""
    contender.server.resume()
    time.sleep(_SETTLE_S)  # timers that came due while it was stopped go off before anything is counted
    try:
        yield contender
    finally:
        contender.server.pause()


def rotated(entered: dict[str, Contender], number: int) -> list[Contender]:
    """Return the contestants in the order of a round. Each round starts with the next contestant."""
    order = list(entered.values())
    return order[number % len(order) :] + order[: number % len(order)]


def check(contender: Contender) -> None:
    """Raise WrongAnswer if the answer is wrong: speed without a right answer does not count."""
    request = contender.request
    parts = urlsplit(request.url)
    connection = HTTPConnection(*request.address, timeout=60)
    try:
        connection.request("POST", parts.path, request.body, HEADERS)
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    found = answer[0] if request.body.startswith(b'{"events"') else answer
    if contender.handler == "sleep":
        right = found == 7
    else:
        right = minilm.difference(found, minilm.reference([minilm.TEXT])[0]) <= minilm.TOLERANCE
    if not right:
        raise WrongAnswer(f"{contender.name} answers {contender.handler} with {str(answer)[:200]}")
