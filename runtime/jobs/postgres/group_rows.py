"""Runs changes of several callers with two statements: one reads all rows that the changes need, and one writes all changed rows.

Between the two statements, the functions of `sql/transitions.py` run one after the other on a copy of the rows. So their results and the
stored rows are the same as if each had run its own statements. If a change reads a row that the copy lacks, such as a result, the
earlier changes are written first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

import orjson

from ....errors import PilotflameError
from ...ground.access.keys import ALL
from ..sql.connection import SqlRow
from ..sql.counting_transaction import CountingTransaction
from ..sql.rows import SELECT_WITHOUT_BODIES, columns_of
from ..sql.store import JobChange
from ..sql.transaction import Transaction
from ..stored.job import COUNTERS, Job, JobOutcome, NewJob, idempotency_digest
from .database import PostgresJobsConnection

MOST_BYTES = 8 << 20
"""When the bodies that must be written have this size, they are written before the next change."""
_READ, _WRITE = (
    (files(__package__) / f"{name}.sql").read_text(encoding="utf-8") for name in ("read_group", "write_group")
)
_DEFAULTS: dict[str, Any] = {
    "attempts": 0, "started_s": 0.0, "ended_s": 0.0, "due_s": 0.0, "expires_s": 0.0, "worker": "", "error": None, "pieces": 0,
    "incarnation": "", "result_size": 0,
}  # fmt: skip
"""The values of the columns of a new job that `columns_of` leaves out."""
_NO_COUNTS = dict.fromkeys((*COUNTERS.values(), "queued_bytes"), 0)


def run_together(
    connection: PostgresJobsConnection, changes: Sequence[JobChange[Any]]
) -> list[tuple[Transaction, Any] | PilotflameError]:
    """Run changes of several callers, each of which names in `job_ids` the jobs whose rows it needs (see `RunTogether`).

    Raise an error if the changes must be run one by one.
    """
    rows = GroupRows(connection, changes)
    results = [rows.run(change) for change in changes]
    rows.write()
    return results


class GroupRows:
    """The rows that a group of changes reads and changes."""

    def __init__(self, connection: PostgresJobsConnection, changes: Sequence[JobChange[Any]]) -> None:
        """Read the rows that `changes` need."""
        self.connection = connection
        self.changed = 0
        """The number of changes of rows so far."""
        self.jobs: dict[str, dict[str, Any]] = {}
        self.keys: set[bytes] = set()
        """The digests of the idempotency keys of `jobs`."""
        self.counters: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.stored: Counter[str] = Counter()
        self._asked = {job_id for change in changes for job_id in change.job_ids}
        self._numbers = self._read([change.new for change in changes if change.new is not None])
        self._clear()

    def run(self, change: JobChange[Any]) -> tuple[Transaction, Any] | PilotflameError:
        """Run a change, and return its result or the error that it raised. If it has changed rows before the error,
        raise the error, because these changes cannot be undone alone.
        """
        if self._size > MOST_BYTES:
            self.write()
        before = self.changed
        try:
            return change(self.connection, self._transaction)
        except PilotflameError as error:
            if self.changed != before:
                raise
            return error

    def job(self, job_id: str) -> dict[str, Any] | None:
        if job_id not in self._asked:
            raise LookupError(job_id)
        return self.jobs.get(job_id)

    def add_job(self, columns: dict[str, Any], new: NewJob) -> int:
        """Add a row of `jobs` and its input, and return its number."""
        number = next(self._numbers)
        self.changed += 1
        key = columns["idempotency"]
        if key is not None:
            self.keys.add(key)
        self.jobs[columns["id"]] = {
            **_DEFAULTS, **columns, "number": number, "idempotency": _bytea(key),
        }  # fmt: skip
        self._new[columns["id"]] = None
        start, size = self._part(b"" if new.large_input else new.input)
        self._inputs.append({"number": number, "start": start, "size": size, "large": new.large_input})
        return number

    def update(self, row: SqlRow, fields: dict[str, Any]) -> None:
        """Change columns of a job. `row` itself is not changed."""
        self.changed += 1
        if "progress" in fields:
            fields = {**fields, "progress": _bytea(fields["progress"])}
        self.jobs[row["id"]] = {**row, **fields}
        self._updated[row["id"]] = None

    def add_result(self, number: int, outcome: JobOutcome) -> None:
        result: dict[str, Any] = {
            "number": number,
            "type": outcome.output_type,
            "large": outcome.large_output,
        }
        body = None if outcome.large_output else outcome.output
        parts = {"logs": outcome.logs.encode(), "body": body, "metrics": outcome.metrics}
        for name, part in parts.items():
            result[name], result[f"{name}_size"] = self._part(part)
        self._results.append(result)

    def add_piece(self, job: int, number: int, piece: bytes) -> None:
        self.changed += 1
        start, size = self._part(piece)
        self._pieces.append({"job": job, "number": number, "start": start, "size": size})

    def of(self, function: str, owner: str) -> Counter[str]:
        return self.counters[function, owner]

    def bytes_of(self, owner: str) -> int:
        return self.stored[owner]

    def count(self, function: str, owner: str, added: dict[str, int]) -> None:
        """Add to the counters of all jobs of a function, and to the counters of the owner's jobs of this function."""
        for one in (ALL, owner) if owner else (ALL,):
            self.counters[function, one].update(added)
            self._counted[function, one].update(added)

    def add_bytes(self, owner: str, added: int) -> None:
        self.stored[owner] += added
        self._added[owner] += added

    def write(self) -> None:
        """Write all changes of rows."""
        if not (self._new or self._updated or self._added or self._counted):
            return
        new = [self.jobs[job_id] for job_id in self._new]
        updated = [self.jobs[job_id] for job_id in self._updated if job_id not in self._new]
        counted = [
            {"function": function, "owner": owner, **_NO_COUNTS, **added}
            for (function, owner), added in sorted(self._counted.items())
        ]
        added = [{"owner": owner, "bytes": added} for owner, added in sorted(self._added.items())]
        tables = (new, updated, self._inputs, self._results, self._pieces, counted, added)
        self.connection.execute(_WRITE, (*map(_json, tables), b"".join(self._bodies)))
        self._clear()

    def _clear(self) -> None:
        """Forget which changes must be written."""
        self._new: dict[str, None] = {}
        self._updated: dict[str, None] = {}
        self._inputs: list[dict[str, Any]] = []
        self._results: list[dict[str, Any]] = []
        self._pieces: list[dict[str, Any]] = []
        self._counted: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self._added: Counter[str] = Counter()
        self._bodies: list[bytes] = []
        self._size = 0

    def _part(self, body: bytes | None) -> tuple[int | None, int | None]:
        """Add a body to the bodies that `write` sends. Return the body's first position, counted from 1, and its size."""
        if body is None:
            return None, None
        start = self._size + 1
        self._bodies.append(body)
        self._size += len(body)
        return start, len(body)

    def _read(self, new: Sequence[NewJob]) -> Iterator[int]:
        """Read the rows, and return an iterator of numbers for new jobs."""
        pairs = {(one.function, owner) for one in new for owner in (ALL, one.owner)}
        keys = [digest.hex() for one in new if (digest := _key(one)) is not None]
        asked = [{"function": function, "owner": owner} for function, owner in sorted(pairs)]
        values = (_json([*self._asked]), _json(keys), _json(asked), len(new))
        row = self.connection.execute(_READ, values).fetchone()
        found = orjson.loads(row[0]) if row is not None else {}
        for job in found["jobs"] or ():
            self.jobs[job["id"]] = job
            if job["idempotency"] is not None:
                self.keys.add(bytes.fromhex(job["idempotency"]))
        for counted in found["counters"] or ():
            self.counters[counted.pop("function"), counted.pop("owner")].update(counted)
        self.stored.update({one["owner"]: one["bytes"] for one in found["stored"] or ()})
        return iter(found["numbers"] or ())

    def _transaction(self, *args: Any, **more: Any) -> _GroupTransaction:
        return _GroupTransaction(self, *args, **more)


class _GroupTransaction(CountingTransaction):
    """One caller's part of a group's transaction that reads and changes GroupRows."""

    def __init__(self, rows: GroupRows, *args: Any, **more: Any) -> None:
        super().__init__(rows, *args, **more)
        self._rows = rows

    def row(self, job_id: str, select: str = SELECT_WITHOUT_BODIES) -> SqlRow | None:
        row = self._rows.job(job_id)
        if row is None or select is SELECT_WITHOUT_BODIES:
            return row
        self._rows.write()
        return super().row(job_id, select)

    def row_of_key(self, digest: bytes | None) -> SqlRow | None:
        if digest not in self._rows.keys:
            return None
        self._rows.write()
        return super().row_of_key(digest)

    def notify(self, row: SqlRow, event: str, logs: str = "") -> None:
        if row["webhook"] is not None:
            self._rows.write()
            super().notify(row, event, logs)

    def insert_pieces(self, pieces: Sequence[tuple[int, int, bytes]]) -> None:
        for piece in pieces:
            self._rows.add_piece(*piece)

    def _insert(self, new: NewJob, job: Job, **more: Any) -> int | None:
        columns = columns_of(new, job, **more)
        if job.id in self._rows.jobs or columns["idempotency"] in self._rows.keys:
            return None
        return self._rows.add_job(columns, new)

    def _insert_result(self, number: int, outcome: JobOutcome) -> None:
        if outcome.output is not None or outcome.logs or outcome.metrics:
            self._rows.add_result(number, outcome)
            self.unused_bodies.discard(outcome.large_output)

    def _update(self, row: SqlRow, fields: Any) -> None:
        self._rows.update(row, fields)
        self.changes.changed.append(row["id"])


def _key(new: NewJob) -> bytes | None:
    return idempotency_digest(new.function, new.owner, new.idempotency)


def _bytea(value: bytes | None) -> str | None:
    """Return the text of a value of type bytea."""
    return None if value is None else f"\\x{value.hex()}"


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
