"""Decides which variables configure a source: the secrets of a function, or the environment of this process.

Variables belong to families, such as those that begin with AWS_. If a function has a secret of a family, only the
function's secrets of this family count. Otherwise a function could name its own server as the endpoint, and the
credentials of this process would be sent to that server.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

AWS = ("AWS_", "PILOTFLAME_S3_")
AZURE = ("AZURE_",)
GOOGLE = ("GOOGLE_",)
HUB = ("HF_", "HUGGING_FACE_HUB_")
REGISTRY = ("DOCKER_AUTH_CONFIG", "PILOTFLAME_OCI_")
MLFLOW = ("MLFLOW_",)
WEB = ("PILOTFLAME_SNAPSHOT_",)
"""In this family, only a function's secrets count, since they are sent to any server that the snapshot's URL names."""

ANONYMOUS_VARIABLE = "PILOTFLAME_S3_ANONYMOUS"
"""If this variable is 1, S3 is read without credentials."""
REQUESTER_PAYS_VARIABLE = "PILOTFLAME_S3_REQUESTER_PAYS"
"""If this variable is 1, requests say that the requester pays for them, which some buckets need."""
TOKEN_VARIABLE, HEADERS_VARIABLE = "PILOTFLAME_SNAPSHOT_TOKEN", "PILOTFLAME_SNAPSHOT_HEADERS"
"""The variables with a bearer token, and with headers, for the web servers that serve weights."""
AUTH_VARIABLE = "DOCKER_AUTH_CONFIG"
"""The variable with the text of an auth file, as docker has it."""
PLAIN_HTTP_VARIABLE = "PILOTFLAME_OCI_PLAIN_HTTP"
"""The variable that lists the registries without TLS, separated by commas."""
OWN_NAMES = (
    ANONYMOUS_VARIABLE,
    REQUESTER_PAYS_VARIABLE,
    TOKEN_VARIABLE,
    HEADERS_VARIABLE,
    PLAIN_HTTP_VARIABLE,
)
"""The variables of sources that have the prefix of the variables of settings."""

STORES = (*AWS, *AZURE, *GOOGLE, *HUB, *REGISTRY, *WEB)
"""The families of the stores to which a model registry may lead."""
FAMILIES = (*STORES, *MLFLOW)


def of_sources(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets of a function that configure sources."""
    return {name: value for name, value in variables.items() if name.startswith(FAMILIES)}


def own_variables(secrets: Mapping[str, str], family: tuple[str, ...]) -> dict[str, str]:
    """Return a function's secrets of one family."""
    return {name: value for name, value in secrets.items() if name.startswith(family)}


def variables_of(
    secrets: Mapping[str, str], family: tuple[str, ...], *, own_only: bool = False
) -> dict[str, str]:
    """Return the variables of one family that configure a source for a function with these secrets.

    With `own_only`, the environment of this process does not count.
    """
    return own_variables(secrets, family) or own_variables({} if own_only else os.environ, family)
