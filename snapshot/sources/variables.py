"""Decides which variables configure a source: the secrets of a function, or the environment of this process.

Variables belong to families, such as those that begin with AWS_. If a function has a secret of a family, only the
function's secrets of this family count. Otherwise a function could name its own server as the endpoint, and the
credentials of this process would be sent to that server.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .access import Access


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """Decides if a source uses the variables and credentials of the function, or those of this process."""

    families: tuple[str, ...]
    """The prefixes of the variables."""
    of_process: bool = True
    """True if a function without own variables may use the variables and profiles of this process, and the identity of its machine.
    This is safe only if the variables, and not the URL, name the server that gets the credentials.
    """

    def own(self, secrets: Mapping[str, str] | None) -> dict[str, str]:
        """Return a function's own variables."""
        return {name: value for name, value in (secrets or {}).items() if name.startswith(self.families)}

    def alone(self, secrets: Mapping[str, str] | None, access: Access) -> bool:
        """Return True if a source for a function with these secrets may use nothing of this process."""
        return not self.of_process or access.own_only or bool(self.own(secrets))

    def variables(self, secrets: Mapping[str, str] | None, access: Access) -> dict[str, str]:
        """Return the variables that configure a source for a function with these secrets."""
        return self.own(secrets if self.alone(secrets, access) else os.environ)


AWS = SourceIdentity(("AWS_", "PILOTFLAME_S3_"))
AZURE = SourceIdentity(("AZURE_",))
GOOGLE = SourceIdentity(("GOOGLE_",))
HUB = SourceIdentity(("HF_", "HUGGING_FACE_HUB_"))
REGISTRY = SourceIdentity(("DOCKER_AUTH_CONFIG", "PILOTFLAME_OCI_"))
WEB = SourceIdentity(("PILOTFLAME_SNAPSHOT_",), of_process=False)
"""Only the secrets of a function are used, since they are sent to any server that the snapshot's URL names."""
STORES = tuple(prefix for one in (AWS, AZURE, GOOGLE, HUB, REGISTRY, WEB) for prefix in one.families)
"""The families of the stores to which a model registry may lead."""
MLFLOW = SourceIdentity(("MLFLOW_",))

ANONYMOUS_VARIABLE = "PILOTFLAME_S3_ANONYMOUS"
"""If this variable is 1, S3 is read without credentials."""
REQUESTER_PAYS_VARIABLE = "PILOTFLAME_S3_REQUESTER_PAYS"
"""If this variable is 1, requests say that the requester pays for them, as some buckets require."""
TOKEN_VARIABLE, HEADERS_VARIABLE = "PILOTFLAME_SNAPSHOT_TOKEN", "PILOTFLAME_SNAPSHOT_HEADERS"
"""The variables with a bearer token, and with headers, for the web servers that serve weights."""
AUTH_VARIABLE = "DOCKER_AUTH_CONFIG"
"""The variable with the text of an auth file in docker's format."""
PLAIN_HTTP_VARIABLE = "PILOTFLAME_OCI_PLAIN_HTTP"
"""The variable that lists the registries without TLS, separated by commas."""
OWN_NAMES = (
    ANONYMOUS_VARIABLE,
    REQUESTER_PAYS_VARIABLE,
    TOKEN_VARIABLE,
    HEADERS_VARIABLE,
    PLAIN_HTTP_VARIABLE,
)
"""The variables of sources that begin with the same prefix as the gateway's settings."""

FAMILIES = (*STORES, *MLFLOW.families)


def of_sources(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets of a function that configure sources."""
    return {name: value for name, value in variables.items() if name.startswith(FAMILIES)}
