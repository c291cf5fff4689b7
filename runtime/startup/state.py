"""Opens the state folder of a gateway: logs, keys, secrets, and the files of functions."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..ground.access.keyring import ACCESS, Keyring, Meter
from ..ground.access.secrets import Secrets
from ..ground.access.shared_quotas import SharedMeter
from ..ground.settings.gateway_settings import GatewaySettings
from ..ground.settings.state_dir import (
    check_not_moving,
    free_bytes,
    is_disk_full,
    locked_state_dir,
    running_marker,
)
from ..ground.storing.documents import Documents
from ..ground.storing.duties import Duties
from ..ground.storing.file_documents import FileDocuments
from ..ground.storing.open_documents import open_documents
from ..ground.telemetry.disk import Disk
from ..ground.telemetry.gateway_log import collected, gateway_logging
from ..ground.telemetry.log_files import LogFiles
from ..ground.telemetry.logs import Logs
from ..ground.telemetry.metrics import Reading
from ..node.functions.store import Retention, Store
from .joining import join

if TYPE_CHECKING:
    from ..ground.storing.membership import Membership
    from ..ground.storing.postgres import PostgresPool

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class State:
    """The state folder of a gateway, which no other gateway uses."""

    folder: Path
    previous: str
    """Names the previous gateway if it ended without shutdown; else ""."""
    disk: Disk
    logs: Logs
    store: Store
    own_documents: Documents
    """The documents that describe only this machine. Gateways do not share them."""
    documents: Documents
    """Keys, secrets and the key that signs webhooks. Gateways with a common database share them."""
    keyring: Keyring
    secrets: Secrets
    members: Membership | None
    """The gateways that share a database; None without one."""
    database: PostgresPool | None
    """Connections to that database for the plugins."""

    @property
    def duties(self) -> Duties:
        return Duties() if self.members is None else self.members.duties

    async def readings(self) -> list[Reading]:
        """Return the metric of the disk's free space."""
        free = await asyncio.to_thread(free_bytes, self.folder)
        await asyncio.to_thread(self.disk.look)
        return [Reading("state_free_bytes", "Free space for the state folder.", {(): free}, ())]


async def open_state(settings: GatewaySettings, stack: contextlib.AsyncExitStack) -> State:
    """Lock and read the state folder. Raise GatewayError if another gateway has it, or if a file is damaged."""
    folder = stack.enter_context(locked_state_dir(settings.state_dir))
    check_not_moving(folder)
    previous = stack.enter_context(running_marker(folder))
    members = await join(settings, folder, stack)
    disk = Disk(folder, functools.partial(is_disk_full, folder))
    logs = await _open_logs(folder, settings, disk, stack)
    store = Store(folder, LOG.warning, Retention(settings.keep_revisions))
    await asyncio.to_thread(store.start)
    own_documents = FileDocuments(folder)
    await asyncio.to_thread(own_documents.remove_leftovers, ACCESS)
    documents = await asyncio.to_thread(open_documents, folder, settings.database)
    stack.push_async_callback(asyncio.to_thread, documents.close)
    pool = None
    if members is not None:
        # The module needs psycopg, which is installed: `join` has imported it.
        from ..ground.storing.postgres import PostgresPool  # noqa: PLC0415

        pool = PostgresPool(members.url)
        stack.callback(pool.close)
    keyring, secrets = Keyring(documents, SharedMeter if members else Meter), Secrets(documents)
    for load in (keyring.load, secrets.load):
        await asyncio.to_thread(load)
    return State(
        folder, previous, disk, logs, store, own_documents, documents, keyring, secrets, members, pool
    )


async def _open_logs(
    folder: Path, settings: GatewaySettings, disk: Disk, stack: contextlib.AsyncExitStack
) -> Logs:
    """Open the logs. The gateway's own messages go to its log and to standard error."""
    files = LogFiles(folder / "logs", keep_s=settings.log_keep_s, on_written=disk.wrote)
    await asyncio.to_thread(files.start)
    stack.push_async_callback(asyncio.to_thread, files.close)
    logs = Logs(files)
    stack.enter_context(gateway_logging(logs, settings.log_level, settings.log_format))
    if settings.log_format == "collector":
        stack.enter_context(collected(logs))
    return logs
