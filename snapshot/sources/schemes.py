"""Lists the schemes of URLs that weights are read from.

For a new scheme, add a row to SCHEMES, and a module, for example to `snapshot/registries/`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from .access import Access, unchecked
from .variables import AWS, AZURE, GOOGLE, HUB, MLFLOW, REGISTRY, STORES, WEB, SourceIdentity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .source import Source


def bucket(url: str) -> str:
    """Return the beginning of a URL, up to and including its first name, which is a bucket or the owner of repositories."""
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


class Connections(enum.Enum):
    """Which code opens the connections of a source. This decides whether the addresses can be limited (access.py)."""

    CHECKED = "checked"
    """The source opens all connections through `Dialer`, also after redirects."""
    OF_A_CLIENT = "of a client"
    """A cloud's client makes some connections without a check. Functions with limits may not use such a source."""


class Leads(enum.Enum):
    """To which other sources the answer of a server may lead. Apart from this, a redirect may lead to any server, which gets no
    credentials.
    """

    NOWHERE = "nowhere"
    STORES = "stores"
    """To URLs of other schemes."""
    STORES_AND_DISK = "stores and disk"
    """Also to folders of this machine, if this process has named the server, and the function may connect everywhere."""


class Scheme(NamedTuple):
    """The source for the URLs of one scheme, the identity that the source uses, and where it connects to."""

    opener: str
    """The class of the source, as "package.module:Class" below `snapshot`. `open` calls Class(url, secrets=..., access=...)."""
    identity: SourceIdentity
    """Decides whose variables and credentials the source uses (variables.py)."""
    place: Callable[[str], str]
    """Returns the part of a folder's URL to which the same credentials give access (realm.py)."""
    connections: Connections
    leads: Leads
    """Where `locate.follow`, the only way from one source to another, may lead."""
    extra: str = ""
    """The extra of pilotflame that installs the packages that the source needs. "" if it needs none."""

    def own(self, secrets: Mapping[str, str] | None) -> dict[str, str]:
        """Return a function's own variables that configure the source, or the stores to which the source leads."""
        stores = () if self.leads is Leads.NOWHERE else STORES
        return SourceIdentity((*self.identity.families, *stores)).own(secrets)

    def open(self, url: str, secrets: Mapping[str, str] | None, access: Access) -> Source:
        """Return the source of a folder's URL. Import the module of the source only here, since ssl and HTTP take time to import.

        Raise SourceDenied if connections must be checked, but cannot be checked. A client with the settings of this process
        needs no check, because the function cannot choose where such a client connects to.
        """
        unchecks = self.connections is Connections.OF_A_CLIENT
        if access.addresses is not None and unchecks and self.identity.alone(secrets, access):
            raise unchecked(url.partition("://")[0])
        module, _, name = self.opener.partition(":")
        source: Source = getattr(import_module(f"..{module}", __package__), name)(
            url, secrets=secrets, access=access
        )
        return source


_CHECKED, _CLIENT = Connections.CHECKED, Connections.OF_A_CLIENT
SCHEMES = {
    "s3": Scheme("sources.s3:S3Source", AWS, bucket, _CHECKED, Leads.NOWHERE, "s3"),
    "gs": Scheme("sources.google:GoogleSource", GOOGLE, bucket, _CLIENT, Leads.NOWHERE, "clouds"),
    "az": Scheme("sources.azure:AzureSource", AZURE, bucket, _CLIENT, Leads.NOWHERE, "clouds"),
    "hf": Scheme("sources.hub:HubSource", HUB, bucket, _CHECKED, Leads.NOWHERE),
    "oci": Scheme("registries.oci:OciSource", REGISTRY, repository, _CHECKED, Leads.NOWHERE),
    "mlflow": Scheme("registries.mlflow:MlflowSource", MLFLOW, model, _CHECKED, Leads.STORES_AND_DISK),
    "http": Scheme("sources.http:HttpSource", WEB, parent, _CHECKED, Leads.NOWHERE),
    "https": Scheme("sources.http:HttpSource", WEB, parent, _CHECKED, Leads.NOWHERE),
}


def scheme_of(url: str) -> Scheme | None:
    """Return the scheme of a URL. None for a path on this machine."""
    name, mark, _ = url.partition("://")
    return SCHEMES.get(name) if mark else None
