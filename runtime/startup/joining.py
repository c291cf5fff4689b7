"""Lets a gateway join the gateways that share a database, if the setting `database` names one."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from ..._version import __version__
from ...snapshot.extras import needs
from ..ground.settings.gateway_settings import GatewaySettings
from ..ground.storing import private_files

if TYPE_CHECKING:
    # The module needs psycopg, which may be missing on a gateway without the setting.
    from ..ground.storing.membership import Membership

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
    # This gateway has the lock of the state folder. So the gateway that wrote the file has ended, unless the folder is a
    # copy. `open` checks this and ends the lease, so that the jobs of that gateway need not wait.
    previous = await asyncio.to_thread(private_files.read, file)
    members.first = previous is None
    await asyncio.to_thread(members.open, (previous or b"").decode())
    stack.push_async_callback(asyncio.to_thread, members.close)
    await asyncio.to_thread(private_files.write, file, incarnation.encode())
    members.start()
    return members


def node_name(settings: GatewaySettings) -> str:
    """Return the name of this gateway that other gateways and people see: host and port."""
    return f"{socket.gethostname()}:{settings.port}"
