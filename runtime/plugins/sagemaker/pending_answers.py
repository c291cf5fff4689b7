"""Stores where the answers of InvokeEndpointAsync go, until they are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel, ValidationError

from ....snapshot.publish import publish

if TYPE_CHECKING:
    # This module needs psycopg, which a gateway without the setting `database` need not have.
    from ...ground.storing.postgres import PostgresPool

FOLDER = "sagemaker"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}\.json")
# Writes nothing if the job was deleted meanwhile.
_PUT = """INSERT INTO pending_answers (job, incarnation, answer) SELECT id, ?2, ?3 FROM jobs WHERE id = ?1
ON CONFLICT (job) DO UPDATE SET incarnation = excluded.incarnation, answer = excluded.answer RETURNING job"""
_TAKE_OVER = """UPDATE pending_answers SET incarnation = ?1
WHERE incarnation = ?1 OR incarnation NOT IN (SELECT incarnation FROM nodes) RETURNING answer"""
_REMOVE = "DELETE FROM pending_answers WHERE job = ? AND incarnation = ? RETURNING job"


class PendingAnswer(BaseModel, frozen=True, extra="forbid"):
    """A job, and the URLs for its output and for its error."""

    job: str
    function: str
    output: str
    failure: str


class PendingAnswers(Protocol):
    """The answers that are not written yet. All methods block."""

    def put(self, pending: PendingAnswer) -> None:
        """Store an answer that this gateway will write."""

    def take_over(self) -> list[PendingAnswer]:
        """Return the answers of this gateway, and those of gateways that have ended. From now on, this gateway writes all of
        them.
        """

    def remove(self, job: str) -> None:
        """Forget an answer of this gateway."""


class AnswerFiles:
    """Keeps pending answers as files in the state folder, for a gateway without a database."""

    def __init__(self, state: Path) -> None:
        self._folder = state / FOLDER

    def put(self, pending: PendingAnswer) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with publish(self._path(pending.job), 0o600) as file:
            file.write(pending.model_dump_json().encode())

    def take_over(self) -> list[PendingAnswer]:
        """Return the answers of all files, except files that a crash has broken."""
        found = []
        for path in sorted(self._folder.glob("*.json")):
            if _NAME.fullmatch(path.name):
                try:
                    found.append(PendingAnswer.model_validate_json(path.read_bytes()))
                except (OSError, ValidationError):
                    continue
        return found

    def remove(self, job: str) -> None:
        self._path(job).unlink(missing_ok=True)

    def _path(self, job: str) -> Path:
        return self._folder / f"{job}.json"


class SharedAnswers:
    """Keeps pending answers as rows in a database that several gateways share. A row is deleted with its job. All methods
    raise JobStoreFailed.
    """

    def __init__(self, pool: PostgresPool, incarnation: str) -> None:
        self._pool, self._incarnation = pool, incarnation

    def put(self, pending: PendingAnswer) -> None:
        self._pool.rows(_PUT, pending.job, self._incarnation, pending.model_dump_json())

    def take_over(self) -> list[PendingAnswer]:
        rows = self._pool.rows(_TAKE_OVER, self._incarnation)
        return [PendingAnswer.model_validate_json(answer) for (answer,) in rows]

    def remove(self, job: str) -> None:
        self._pool.rows(_REMOVE, job, self._incarnation)
