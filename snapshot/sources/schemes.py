"""Lists the schemes of URLs that weights are read from. A new scheme is a row here and a module beside it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from .variables import AWS, AZURE, GOOGLE, HUB, WEB

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .source import Source


def bucket(url: str) -> str:
    """Return a URL up to its first name: a bucket, or the owner of repositories."""
    name, _, rest = url.partition("://")
    # The ARN of an access point has a slash before its name.
    names = rest.split("/")[: 2 if rest.startswith("arn:") else 1]
    return f"{name}://{'/'.join(names)}"


def parent(url: str) -> str:
    """Return the URL of the folder above; a folder at the root as it is: such folders may belong to different people."""
    name, parts = url.partition("://")[0], urlsplit(url)
    path = parts.path.rstrip("/")
    path = path.rpartition("/")[0] or path
    return f"{name}://{parts.netloc}{path}?{parts.query}"


class Scheme(NamedTuple):
    """How the URLs of one scheme are read."""

    opener: str
    """The class of its source, as "module:Class" of this package. It is called as Class(url, secrets=...)."""
    secrets: tuple[str, ...]
    """The beginnings of the variables that configure it, among a function's secrets and in the environment (variables.py)."""
    place: Callable[[str], str] = bucket
    """Returns the part of a folder's URL to which the same credentials give access (realm.py)."""
    extra: str = ""
    """The extra of pilotflame that installs what it needs; "" for none."""

    def open(self, url: str, secrets: Mapping[str, str] | None) -> Source:
        """Return the source of a folder's URL. Imports its module: ssl and HTTP take time to import."""
        module, _, name = self.opener.partition(":")
        source: Source = getattr(import_module(f".{module}", __package__), name)(url, secrets=secrets)
        return source


SCHEMES = {
    "s3": Scheme("s3:S3Source", AWS, extra="s3"),
    "gs": Scheme("google:GoogleSource", GOOGLE, extra="clouds"),
    "az": Scheme("azure:AzureSource", AZURE, extra="clouds"),
    "hf": Scheme("hub:HubSource", HUB),
    "http": Scheme("http:HttpSource", WEB, parent),
    "https": Scheme("http:HttpSource", WEB, parent),
}


def scheme_of(url: str) -> Scheme | None:
    """Return the row of a URL; None for a path on this machine."""
    name, mark, _ = url.partition("://")
    return SCHEMES.get(name) if mark else None
