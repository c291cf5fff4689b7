"""Upgrades the tables of a PostgreSQL database by numbered files: `0001_pre_jobs.sql`.

A *pre* migration only adds, so gateways of the version before go on beside it: any gateway that starts applies it. A *post* migration
removes what only that version needs, so an operator applies it when no gateway of that version is left.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from importlib.resources import files
from importlib.resources.abc import Traversable

from ....errors import JobStoreFailed
from .postgres import PostgresConnection

_NAME = re.compile(r"\d{4}_(pre|post)_\w+\.sql")
_LOCK = "SELECT pg_advisory_xact_lock(hashtext('pilotflame migrations ' || current_schema()))"
_TABLE = "CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY, applied TIMESTAMPTZ NOT NULL DEFAULT now())"
FOLDER: Traversable = files(__package__) / "migrations"


def migrate(
    connection: PostgresConnection, folder: Traversable = FOLDER, *, kinds: Collection[str] = ("pre",)
) -> list[str]:
    """Apply the files of these kinds that the database lacks, in the order of their numbers, in one transaction. Return their names.

    If another gateway applies them, wait for it. Raises JobStoreFailed if a newer pilotflame has removed what this one needs,
    or psycopg.Error.
    """
    known = sorted(file.name for file in folder.iterdir() if _NAME.fullmatch(file.name))
    connection.run(f"BEGIN; {_LOCK}; {_TABLE}")
    done = {name for (name,) in connection.run("SELECT name FROM migrations")}
    if removed := sorted(name for name in done - {*known} if "_post_" in name):
        connection.run("ROLLBACK")
        raise JobStoreFailed(
            f"The database has the migration {removed[-1]} of a newer pilotflame.",
            remedy="Use that pilotflame, or a newer one.",
        )
    new = [name for name in known if name not in done and name.split("_")[1] in kinds]
    for name in new:
        connection.run((folder / name).read_text(encoding="utf-8"))
        connection.execute("INSERT INTO migrations (name) VALUES (?)", (name,))
    connection.run("COMMIT")
    return new
