"""Joins the gateways that share a database, if the setting `database` names one, and follows them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from ..._version import __version__
from ...snapshot.extras import needs
from ..front.http.endless_answers import EndlessAnswers
from ..ground.access.access_watch import AccessWatch
from ..ground.settings.gateway_settings import GatewaySettings
from ..ground.storing import private_files
from ..ground.telemetry.background import BackgroundTasks
from ..jobs.stored.jobs import Jobs
from ..node.functions.rollouts import Rollouts

if TYPE_CHECKING:
    # It needs psycopg, which a gateway without the setting need not have.
    from ..ground.storing.membership import Membership
    from .state import State

INCARNATION_FILE = "incarnation"


async def join(
    settings: GatewaySettings, folder: Path, stack: contextlib.AsyncExitStack
) -> Membership | None:
    """Become one of the gateways that share the database. Return None without the setting.

    Raise PackageMissing, or GatewayError if the database cannot be used.
    """
    if settings.database is None:
        return None
    with needs("The setting database", "psycopg"):
        from ..ground.storing.membership import Membership  # noqa: PLC0415
    incarnation, file = secrets.token_hex(8), folder / INCARNATION_FILE
    members = Membership(settings.database.get_secret_value(), incarnation, node_name(settings), __version__)
    # The lock of the state folder says that the gateway of this file has ended, so its jobs need not wait for the end of its lease.
    previous = await asyncio.to_thread(private_files.read, file) or b""
    await asyncio.to_thread(members.open, previous.decode())
    stack.push_async_callback(asyncio.to_thread, members.close)
    await asyncio.to_thread(private_files.write, file, incarnation.encode())
    members.start()
    return members


def node_name(settings: GatewaySettings) -> str:
    """Return what other gateways and people call this gateway."""
    return f"{socket.gethostname()}:{settings.port}"


def follow(members: Membership, jobs: Jobs, tasks: BackgroundTasks, stack: contextlib.AsyncExitStack) -> None:
    """Follow, after each heartbeat, what the other gateways do with jobs."""
    others, news = jobs.others(), asyncio.Event()
    others.start(tasks)
    stack.callback(others.close)

    async def look() -> None:
        while True:
            await news.wait()
            news.clear()
            await others.look(dead=not all(one.alive for one in members.members))

    members.followers.append(news.set)
    stack.callback(tasks.keep(look, name="other_gateways").cancel)


def follow_access(
    state: State, rollouts: Rollouts, endless: EndlessAnswers, tasks: BackgroundTasks, stack: contextlib.AsyncExitStack
) -> None:  # fmt: skip
    """Follow, after each heartbeat, which keys and secrets the other gateways have changed."""
    if (members := state.members) is None:
        return
    watch, news = AccessWatch(state.documents, state.keyring, state.secrets), asyncio.Event()

    async def look() -> None:
        while True:
            await news.wait()
            news.clear()
            changes = await asyncio.to_thread(watch.look)
            for key in changes.revoked:
                endless.end_of_key(key)
            for name in changes.functions:
                rollouts.renew(name)

    members.followers.append(news.set)
    stack.callback(tasks.keep(look, name="access").cancel)
