"""Opens the documents of a gateway: files of its state folder, or the documents of the database that it shares with others."""

from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr

from ....snapshot.extras import needs
from .documents import Documents
from .file_documents import FileDocuments


def open_documents(state: Path, database: SecretStr | None) -> Documents:
    """Return the documents. `database` is the setting of this name. Blocks. Raise PackageMissing, or GatewayError if the database cannot be used."""
    if database is None:
        return FileDocuments(state)
    with needs("The setting database", "psycopg"):
        # Imported only here, because most gateways have no database.
        from .postgres import prepare_database  # noqa: PLC0415
        from .postgres_documents import PostgresDocuments  # noqa: PLC0415
    url = database.get_secret_value()
    prepare_database(url)
    return PostgresDocuments(url)
