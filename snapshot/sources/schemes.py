"""Lists the schemes of URLs that weights are read from. For a new scheme, add a row here and a module beside it."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from .access import Access, unchecked
from .variables import AWS, AZURE, GOOGLE, HUB, MLFLOW, REGISTRY, STORES, WEB, own_variables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .source import Source


def bucket(url: str) -> str:
    """Return the beginning of a URL, through its first name: a bucket, or the owner of repositories."""
    name, _, rest = url.partition("://")
    # The ARN of an access point has a slash before its name.
    names = rest.split("/")[: 2 if rest.startswith("arn:") else 1]
    return f"{name}://{'/'.join(names)}"


def parent(url: str) -> str:
    """Return the URL of the folder above. A folder at the root is a place of its own, so return its own URL."""
    name, parts = url.partition("://")[0], urlsplit(url)
    path = parts.path.rstrip("/")
    path = path.rpartition("/")[0] or path
    return f"{name}://{parts.netloc}{path}?{parts.query}"


def repository(url: str) -> str:
    """Return the URL of a repository of a registry, without tag, digest and folder."""
    registry, _, rest = url.removeprefix("oci://").partition("/")
    return f"oci://{registry}/{re.split('[:@]', rest, maxsplit=1)[0]}"


def model(url: str) -> str:
    """Return the URL of a model of MLflow, without version, alias and folder."""
    return f"mlflow://{re.split('[/@]', url.removeprefix('mlflow://'), maxsplit=1)[0]}"


class Scheme(NamedTuple):
    """The source, the variables and the places of the URLs of one scheme."""

    opener: str
    """The class of the source, as "room.module:Class" of the package `snapshot`. `open` calls Class(url, secrets=..., access=...)."""
    secrets: tuple[str, ...]
    """The prefixes of the variables that configure the source, in a function's secrets and in the environment
    (variables.py)."""
    place: Callable[[str], str] = bucket
    """Returns the part of a folder's URL to which the same credentials give access (realm.py)."""
    extra: str = ""
    """The extra of pilotflame that installs the packages that the source needs. "" if it needs none."""

    checks: bool = True
    """True if all connections of the source are checked (access.py). False if a cloud's client makes some of them."""

    def open(self, url: str, secrets: Mapping[str, str] | None, access: Access) -> Source:
        """Return the source of a folder's URL. Imports its module only here, since ssl and HTTP take time to import.

        Raises SourceDenied if connections must be checked and cannot be. That does not concern clients with the settings of
        this process, because the function cannot choose where such a client connects to.
        """
        own = access.own_only or own_variables(secrets or {}, self.secrets)
        if access.addresses is not None and not self.checks and own:
            raise unchecked(url.partition("://")[0])
        module, _, name = self.opener.partition(":")
        source: Source = getattr(import_module(f"..{module}", __package__), name)(
            url, secrets=secrets, access=access
        )
        return source


SCHEMES = {
    "s3": Scheme("sources.s3:S3Source", AWS, extra="s3"),
    "gs": Scheme("sources.google:GoogleSource", GOOGLE, extra="clouds", checks=False),
    "az": Scheme("sources.azure:AzureSource", AZURE, extra="clouds", checks=False),
    "hf": Scheme("sources.hub:HubSource", HUB),
    "oci": Scheme("registries.oci:OciSource", REGISTRY, repository),
    "mlflow": Scheme("registries.mlflow:MlflowSource", (*MLFLOW, *STORES), model),
    "http": Scheme("sources.http:HttpSource", WEB, parent),
    "https": Scheme("sources.http:HttpSource", WEB, parent),
}


def scheme_of(url: str) -> Scheme | None:
    """Return the scheme of a URL. None for a path on this machine."""
    name, mark, _ = url.partition("://")
    return SCHEMES.get(name) if mark else None
