"""Decides which variables configure a source: the secrets of a function, or the environment of this process.

Variables belong to families, such as those that begin with AWS_. If a function has a secret of a family, only
its secrets of this family count. Otherwise a function could combine the credentials of this process with an
endpoint of its own, and have them sent there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

AWS = ("AWS_", "PILOTFLAME_S3_")
AZURE = ("AZURE_",)
GOOGLE = ("GOOGLE_",)
HUB = ("HF_", "HUGGING_FACE_HUB_")
WEB = ("PILOTFLAME_SNAPSHOT_",)
"""Only a function's secrets count: they are sent to whatever server the URL of its snapshot names."""

ANONYMOUS_VARIABLE = "PILOTFLAME_S3_ANONYMOUS"
"""The variable that, if it is 1, lets S3 be read without credentials."""
REQUESTER_PAYS_VARIABLE = "PILOTFLAME_S3_REQUESTER_PAYS"
"""The variable that, if it is 1, agrees to pay for the requests to buckets whose owner does not."""
TOKEN_VARIABLE, HEADERS_VARIABLE = "PILOTFLAME_SNAPSHOT_TOKEN", "PILOTFLAME_SNAPSHOT_HEADERS"
"""A bearer token, and headers, for the web servers of weights."""
OWN_NAMES = (ANONYMOUS_VARIABLE, REQUESTER_PAYS_VARIABLE, TOKEN_VARIABLE, HEADERS_VARIABLE)
"""The variables of sources that begin as those of settings do."""

FAMILIES = (*AWS, *AZURE, *GOOGLE, *HUB, *WEB)


def of_sources(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets of a function that configure sources."""
    return {name: value for name, value in variables.items() if name.startswith(FAMILIES)}


def own_variables(secrets: Mapping[str, str], family: tuple[str, ...]) -> dict[str, str]:
    """Return a function's secrets of one family."""
    return {name: value for name, value in secrets.items() if name.startswith(family)}


def variables_of(secrets: Mapping[str, str], family: tuple[str, ...]) -> dict[str, str]:
    """Return the variables of one family that configure a source for a function with these secrets."""
    return own_variables(secrets, family) or own_variables(os.environ, family)
