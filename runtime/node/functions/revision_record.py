"""Defines the record of a stored revision."""

from __future__ import annotations

import hashlib
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, BeforeValidator, Field, model_validator

from ....errors import LauncherError
from ...calls.link.handler_facts import checked
from ...ground.access.deploy_policy import Deployer
from ...ground.settings.function_settings import FunctionSettings
from ...ground.settings.removed import REMOVED, without_removed
from ...ground.storing import private_files


class StoredSnapshot(BaseModel, frozen=True, extra="forbid"):
    """Where a revision's weights are: at a path on this node, or at a URL. A path inside the revision's code is
    relative to the code.
    """

    root: Path | None = None
    url: str | None = None


def _facts(stored: Any) -> dict[str, Any]:
    """Return the stored facts of a handler. Facts that cannot be true count as not known."""
    try:
        return checked(stored)
    except LauncherError:
        return {}


class RevisionFields(BaseModel, frozen=True, extra="forbid"):
    """The part of a revision's record that is known before the store gives the revision its id."""

    code_digest: str
    settings: FunctionSettings
    setting_origins: dict[str, str] = Field(default_factory=dict)
    snapshots: dict[str, StoredSnapshot] = Field(
        default_factory=dict, description="By name; the only one has none."
    )
    python: Path
    requirements_digest: str
    handler: Annotated[dict[str, Any], BeforeValidator(_facts)] = Field(
        default_factory=dict, description="The facts that its zygote has reported about its handler."
    )
    warnings: tuple[str, ...] = ()
    deployed_by: str = Field("", description="The id of the API key that deployed it.")
    deployer: str = Field("", description="The name of that key; the key may be revoked later.")

    @model_validator(mode="before")
    @classmethod
    def _forget_removed(cls, stored: Any) -> Any:
        """Remove the settings of an earlier release that no longer exist."""
        if not isinstance(stored, dict) or not isinstance(settings := stored.get("settings"), dict):
            return stored
        origins = {key: one for key, one in stored.get("setting_origins", {}).items() if key not in REMOVED}
        return {**stored, "settings": without_removed(settings), "setting_origins": origins}


class RevisionRecord(RevisionFields):
    """The content of `revision.json`. It never changes once the revision is live."""

    function: str
    revision: str
    number: int
    created_at: AwareDatetime

    @property
    def owner(self) -> Deployer:
        """The API key that deployed it."""
        return Deployer(self.deployed_by, self.deployer)

    @property
    def lost(self) -> bool:
        """True if it stands in for a live revision whose files are damaged. No process can run it."""
        return False

    @classmethod
    def parse(cls, text: str) -> RevisionRecord:
        """Read the JSON of a record that another gateway has written. Raise GatewayError if it cannot be used."""
        return private_files.parse(
            text.encode(), _ReceivedRevision, "The record of a revision in the database"
        )

    @classmethod
    def of(cls, fields: RevisionFields, number: int) -> RevisionRecord:
        """Return the record of a new revision, with the id that the revision gets."""
        name, now = fields.settings.name, datetime.now(UTC)
        content = f"{fields.code_digest}\n{fields.settings.model_dump_json()}".encode()
        revision = f"r{number}-{hashlib.sha256(content).hexdigest()[:8]}"
        return cls(**dict(fields), function=name, revision=revision, number=number, created_at=now)


class _ReceivedRevision(RevisionRecord, extra="ignore"):
    """Ignores what a newer gateway has written in addition."""


class LostRevision(RevisionRecord):
    """Stands in for a live revision whose files are damaged, so that its function is listed and can be rolled back."""

    @property
    def lost(self) -> bool:
        return True

    @classmethod
    def like(cls, record: RevisionRecord | None, function: str, revision: str) -> LostRevision:
        """Return the stand-in. It has the settings and the owner of `record`, an older revision, if `record` is given."""
        given = dict(record) if record is not None else {
            "code_digest": "", "settings": FunctionSettings(name=function), "python": Path(sys.executable),
            "requirements_digest": "", "created_at": datetime.now(UTC),
        }  # fmt: skip
        number = int(revision[1:].partition("-")[0])
        return cls(
            **given
            | {"function": function, "revision": revision, "number": number, "warnings": (), "snapshots": {}}
        )
