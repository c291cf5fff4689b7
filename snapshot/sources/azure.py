"""Defines the source that reads and writes Azure Blob Storage, at signed URLs."""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from ...errors import SourceDenied, SourceError
from .access import ANY, Access
from .cloud import RETRIES, SIGNED_FOR, CloudSource, is_set
from .location import Location
from .variables import AZURE

# Requests with a token must name this version of the protocol.
_VERSION = {"x-ms-version": "2023-11-03"}
_SIGNED_VERSION = "2020-12-06"
CLOCKS_DIFFER = timedelta(minutes=5)
_KEYS = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY")
_SIGNATURES = ("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN")


class AzureSource(CloudSource):
    """The blobs below `az://container/prefix` of the account AZURE_STORAGE_ACCOUNT_NAME.

    The variables have the names that obstore uses: the account's key, a shared access signature (SAS) or a token.
    Without such a variable, requests use the identity of the machine or workload, and a delegated key signs URLs. A
    function with secrets whose names begin with AZURE_ does not use the machine's credentials.
    """

    scheme = "az"

    def __init__(self, url: str, secrets: Mapping[str, str] | None = None, access: Access = ANY) -> None:
        variables = AZURE.variables(secrets, access)
        self._account = variables.get("AZURE_STORAGE_ACCOUNT_NAME", "")
        if not self._account:
            remedy = "Set it to the account's name, in the environment or as a secret of the function."
            raise SourceError("az:// needs AZURE_STORAGE_ACCOUNT_NAME.", remedy=remedy)
        named = variables.get("AZURE_STORAGE_ENDPOINT") or variables.get("AZURE_ENDPOINT")
        self._endpoint = named or f"https://{self._account}.blob.core.windows.net"
        super().__init__(url, self._endpoint, access)
        alone = AZURE.alone(secrets, access)
        self._kind, self._secret = _credential(variables, own=alone)
        self.credentials = _CREDENTIALS[self._kind]

    def resolve(self, name: str) -> Location:
        if self._kind == "sas_token":
            return Location(f"{self.address(name)}?{self._secret.removeprefix('?')}")
        if self._kind == "bearer_token":
            return Location(self.address(name), {"Authorization": f"Bearer {self._secret}", **_VERSION})
        if self._kind == "anonymous":
            return Location(self.address(name), _VERSION)
        if self._kind == "access_key":
            return Location(f"{self.address(name)}?{self._signature()}")
        # obstore signs the percent-encoded name. So Azure refuses the signature if the name has characters to encode.
        with self.calling(name) as (obstore, store):
            return Location(obstore.sign(store, "GET", self.key(name), SIGNED_FOR))

    def _signature(self) -> str:
        """Return a shared access signature for reading the container, made with the account's key.

        See "Create a service SAS" in Microsoft's documentation.
        """
        now = datetime.now(UTC)
        # Let the signature be valid a few minutes earlier, because the clocks of this machine and of the server may differ.
        start, end = (f"{when:%Y-%m-%dT%H:%M:%SZ}" for when in (now - CLOCKS_DIFFER, now + SIGNED_FOR))
        resource = f"/blob/{self._account}/{self.bucket}"
        text = "\n".join(("r", start, end, resource, "", "", "", _SIGNED_VERSION, "c", *[""] * 7))
        try:
            digest = hmac.digest(base64.b64decode(self._secret, validate=True), text.encode(), "sha256")
        except ValueError:
            raise SourceDenied(
                f"{self.url}: the account's key is not base64.", remedy="Copy it again."
            ) from None
        signed = {"sp": "r", "st": start, "se": end, "sv": _SIGNED_VERSION, "sr": "c"}
        return urlencode({**signed, "sig": base64.b64encode(digest).decode()})

    def open_store(self, options: dict[str, Any]) -> Any:
        from obstore.store import AzureStore  # noqa: PLC0415

        config: dict[str, Any] = {"account_name": self._account, "endpoint": self._endpoint}
        if self._kind == "anonymous":
            config["skip_signature"] = True
        elif self._kind != "auto":
            # obstore also reads the environment. With a type, it uses no other credentials than these.
            config |= {"credential_type": self._kind, _FIELDS[self._kind]: self._secret}
        return AzureStore(self.bucket, config=config, client_options=options, retry_config=RETRIES)  # type: ignore[arg-type]


_FIELDS = {"access_key": "account_key", "sas_token": "sas_key", "bearer_token": "token"}
_CREDENTIALS = {
    "access_key": "with the account's key",
    "sas_token": "with a shared access signature",
    "bearer_token": "with the token in AZURE_STORAGE_TOKEN",
    "anonymous": "anonymously, as configured",
    "auto": "with the identity of this machine",
}


def _credential(variables: Mapping[str, str], *, own: bool) -> tuple[str, str]:
    """Return the type of the credential and its secret. The type is a value of obstore, "anonymous" or "auto"."""
    if is_set(variables, "AZURE_SKIP_SIGNATURE"):
        return "anonymous", ""
    for kind, names in (
        ("access_key", _KEYS),
        ("sas_token", _SIGNATURES),
        ("bearer_token", ("AZURE_STORAGE_TOKEN",)),
    ):
        for name in names:
            if secret := variables.get(name):
                return kind, secret
    return ("anonymous", "") if own else ("auto", "")
