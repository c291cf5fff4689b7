"""Parses the URLs of artifacts: `oci://registry/repository:tag@digest/folder`."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace

from ...errors import SourceError
from ..sources.source import name_fault

DIGEST = r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}"
_DOCKER_HUB = "docker.io"
_REFERENCE = re.compile(
    r"oci://(?P<registry>(?:[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?)"
    r"/(?P<repository>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
    rf"(?:@(?P<digest>{DIGEST}))?"
    r"(?:/(?P<folder>.+))?",
    re.ASCII,
)
MAX_REFERENCE_CHARS = 2048


@dataclass(frozen=True, slots=True)
class Reference:
    """The parts of `oci://registry/repository:tag@digest/folder`. At least one of `tag` and `digest` is not ""."""

    registry: str
    repository: str
    tag: str
    digest: str
    folder: str

    @staticmethod
    def of(url: str) -> Reference:
        """Return the parts of a URL. The tag is `latest` if the URL has neither tag nor digest. Raise SourceError."""
        found = _REFERENCE.fullmatch(url.rstrip("/")) if len(url) <= MAX_REFERENCE_CHARS else None
        parts = found.groupdict("") if found is not None else {}
        if not parts or (parts["folder"] and name_fault(parts["folder"])) or "//" in parts["repository"]:
            remedy = "Write oci://registry/repository:tag or @sha256:…, with /folder after it if needed."
            raise SourceError(f"{url[:200]!r} is not a reference to an artifact.", remedy=remedy)
        if not parts["tag"] and not parts["digest"]:
            parts["tag"] = "latest"
        return Reference(**parts)

    def pinned(self, digest: str) -> Reference:
        """Return the reference with this digest. The tag stays, to tell where the digest came from."""
        return replace(self, digest=digest)

    @property
    def host(self) -> str:
        """The host and port that serve the registry."""
        return "registry-1.docker.io" if self.registry == _DOCKER_HUB else self.registry

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        folder = f"/{self.folder}" if self.folder else ""
        return f"oci://{self.registry}/{self.repository}{tag}{digest}{folder}"


def digest_of(content: bytes | memoryview, like: str) -> str:
    """Return the digest of `content`, with the algorithm of the digest `like`."""
    algorithm = like.partition(":")[0]
    return f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}"
