"""Pages of web servers that list a folder, and pages that only look like it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import SourceError
from pilotflame.snapshot.sources.source import name_fault
from pilotflame.snapshot.sources.web_listing import entries, listed_names

NGINX = """<html><head><title>Index of /w/</title></head><body><h1>Index of /w/</h1><hr><pre><a href="../">../</a>
<a href="1_Pooling/">1_Pooling/</a>      21-Nov-2026 10:00    -
<a href="config.json">config.json</a>    21-Nov-2026 10:00   13
<a href="my%20model.safetensors">my model.safetensors</a>  21-Nov-2026 10:00   13
</pre></body></html>"""
APACHE = """<table><tr><th><a href="?C=N;O=D">Name</a></th></tr>
<tr><td><a href="/">Parent Directory</a></td></tr><tr><td><a href="1_Pooling/">1_Pooling/</a></td></tr>
<tr><td><A HREF="/w/config.json">config.json</A></td></tr><tr><td><a href="my%20model.safetensors">m</a></td></tr>
<tr><td><a href="https://example.org/other.json">by Apache</a></td></tr></table>"""
LISTED = ["1_Pooling/", "config.json", "my model.safetensors"]


@pytest.mark.parametrize(
    ("kind", "page"),
    [
        ("text/html", NGINX),
        ("text/html; charset=utf-8", APACHE),
        ("application/json", json.dumps(
            [{"name": "1_Pooling", "type": "directory"}, {"name": "config.json", "type": "file", "size": 3},
             {"name": "my model.safetensors", "type": "file"}])),
        ("application/json", json.dumps(
            [{"name": "1_Pooling/", "is_dir": True}, {"name": "config.json"}, {"name": "my model.safetensors"}, 3])),
    ],
)  # fmt: skip
def test_the_pages_of_web_servers_are_read(kind: str, page: str) -> None:
    assert entries("https://host/w/", kind, page.encode()) == LISTED


def test_folders_are_found_whatever_they_are_called() -> None:
    pages = {
        "https://host/w/": '<a href="a%20b/">x</a><a href="50%25%3f/">x</a><a href="./http%3Ax/">x</a>',
        "https://host/w/a%20b/": '<a href="1.json">x</a>',
        "https://host/w/50%25%3F/": '<a href="c%20d/">x</a>',
        "https://host/w/50%25%3F/c%20d/": '<a href="2.json">x</a>',
        "https://host/w/http%3Ax/": '<a href="3.json">x</a>',
    }
    found = listed_names("https://host/w/", lambda url: ("text/html", pages[url].encode()))
    assert found == ["50%?/c d/2.json", "a b/1.json", "http:x/3.json"]


@pytest.mark.parametrize("kind", ["text/plain", "application/octet-stream", ""])
def test_what_is_no_page_is_no_listing(kind: str) -> None:
    with pytest.raises(SourceError, match="no page that lists"):
        entries("https://host/w/", kind, b"<a href='x'>x</a>")


@given(
    st.lists(st.text(max_size=30) | st.sampled_from(["../x", "//h/x", "/w/../../etc", "%2e%2e/x", "a//b"])),
    st.booleans(),
)
def test_no_listing_names_a_file_elsewhere(names: list[str], as_json: bool) -> None:
    listed = [{"name": name} for name in names]
    page = json.dumps(listed) if as_json else "".join(f'<a href="{name}">x</a>' for name in names)
    kind = "application/json" if as_json else "text/html"
    for name in entries("https://host/w/", kind, page.encode("utf-8", "replace")):
        assert name_fault(name.removesuffix("/")) is None
        assert "/" not in name.removesuffix("/")
        assert not name.startswith(".")
