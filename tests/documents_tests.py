"""The contract of a store of documents: names, changes that are never lost, and how another gateway notices them."""

from __future__ import annotations

import string
import threading
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pilotflame.errors import GatewayError
from pilotflame.runtime.ground.storing.documents import Documents

NAME = "access/keys.json"
FIRST = string.ascii_letters + string.digits + "_-"
PART = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,20}", fullmatch=True)
# Names that a store must refuse: paths out of the folder, hidden files, and names that another store or an
# operator could read differently.
ESCAPES = [
    "", "/", ".", "..", "/etc/passwd", "../a", "a/../../b", "a/..", "a/./b", "a//b", "a/", "/a", ".a", "a/.b", "a\0", "a\n", "a\\b",
    "ä", "a b", "\udcff", "~", "a/~",
]  # fmt: skip


class DocumentsTests:
    """Tests of a `Documents`.

    Needs the fixtures `documents` and `other`: the stores of two gateways that have the same documents, at first none. They are the same
    object for a store that serves one gateway.
    """

    def test_a_document_is_what_was_put_last_for_each_gateway(self, documents: Documents, other: Documents):
        assert documents.get(NAME) is None
        for data in (b"\x00\xff\r\n", b"", b"x" * 3_000_000):
            documents.put(NAME, data)
            assert documents.get(NAME) == other.get(NAME) == data
        other.put(NAME, b"last", durable=False)
        assert documents.get(NAME) == b"last"

    def test_a_removed_document_is_gone_and_may_come_again(self, documents: Documents, other: Documents):
        documents.remove(NAME)
        documents.put(NAME, b"1")
        other.remove(NAME)
        other.remove(NAME)
        assert documents.get(NAME) is None
        assert documents.all("access/") == {}
        documents.put(NAME, b"2")
        assert other.get(NAME) == b"2"

    def test_all_returns_the_documents_below_a_prefix(self, documents: Documents, other: Documents):
        assert documents.all("access/") == {}
        names = [
            "access/secrets/f.json",
            "access/secrets/g.json",
            NAME,
            "accessed/x",
            "webhook-secret",
            "a/b/c/d",
        ]
        for name in names:
            documents.put(name, name.encode())
        assert other.all("access/") == {name: name.encode() for name in names[:3]}
        assert other.all("access/secrets/") == {name: name.encode() for name in names[:2]}
        assert other.all("a/") == {"a/b/c/d": b"a/b/c/d"}
        assert other.all("none/") == {}

    def test_update_makes_changes_and_removes(self, documents: Documents, other: Documents):
        seen = list[bytes | None]()

        def appended(before: bytes | None) -> bytes:
            seen.append(before)
            return (before or b"") + b"x"

        assert documents.update(NAME, appended) == b"x"
        assert other.update(NAME, appended) == b"xx"
        assert documents.update(NAME, lambda before: before) == b"xx"
        assert other.update(NAME, lambda _: None) is None
        assert documents.get(NAME) is None
        assert documents.update(NAME, lambda _: None) is None
        assert seen == [None, b"x"]

    def test_a_change_that_raises_an_error_changes_nothing(self, documents: Documents, other: Documents):
        def refuse(_: bytes | None) -> bytes:
            raise KeyError("no")

        for before in (None, b"1"):
            generation = other.generation("access/")
            with pytest.raises(KeyError):
                documents.update(NAME, refuse)
            assert other.get(NAME) == before
            assert other.generation("access/") == generation
            # The error has released the lock, so another change succeeds.
            documents.put(NAME, b"1")

    def test_no_update_of_any_gateway_is_lost(self, documents: Documents, other: Documents):
        """Eight threads, four at each gateway, count in the same documents."""

        def counted(before: bytes | None) -> bytes:
            return str(int(before or b"0") + 1).encode()

        def count(store: Documents) -> None:
            for number in range(10):
                store.update("count", counted)
                store.put(f"else/{number}", b"", durable=False)
                store.update("list/one", lambda before: (before or b"") + b"x")

        threads = [threading.Thread(target=count, args=(store,)) for store in (documents, other) * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert documents.get("count") == b"80"
        assert other.get("list/one") == b"x" * 80
        assert len(documents.all("else/")) == 10

    def test_a_document_that_two_gateways_make_is_made_once(self, documents: Documents, other: Documents):
        made, start = list[bytes | None](), threading.Barrier(8)

        def make(store: Documents, own: bytes) -> None:
            start.wait()
            made.append(store.update(NAME, lambda before: own if before is None else before))

        threads = [
            threading.Thread(target=make, args=((documents, other)[number % 2], b"%d" % number))
            for number in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made == [documents.get(NAME)] * 8

    def test_readers_see_whole_documents(self, documents: Documents, other: Documents):
        wholes, ended, seen = {b"%d" % number * 200_000 for number in range(3)}, threading.Event(), set()
        documents.put(NAME, b"0" * 200_000)

        def read() -> None:
            while not ended.is_set():
                seen.add(other.get(NAME))
                seen.update(other.all("access/").values())

        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(20):
            for data in sorted(wholes):
                documents.put(NAME, data, durable=False)
        ended.set()
        reader.join()
        assert seen <= wholes

    def test_another_gateway_notices_each_change(self, documents: Documents, other: Documents):
        changes: list[Callable[[], object]] = [
            lambda: documents.put("access/secrets/f.json", b"1"),
            lambda: documents.put("access/secrets/f.json", b"2"),
            lambda: documents.put("access/secrets/g.json", b"1", durable=False),
            lambda: documents.update("access/secrets/f.json", lambda _: b"3"),
            lambda: documents.remove("access/secrets/f.json"),
            lambda: documents.put("access/secrets/f.json", b"1"),
            lambda: documents.update("access/secrets/f.json", lambda _: None),
        ]
        for change in changes:
            before = (
                other.generation("access/secrets/"),
                other.generation("access/"),
                other.generation("else/"),
            )
            change()
            assert other.generation("access/secrets/") > before[0]
            assert other.generation("access/") > before[1]
            assert other.generation("else/") == before[2]
        documents.get("access/secrets/g.json")
        before = other.generation("access/"), 0, 0
        documents.update("access/secrets/g.json", lambda stored: stored)
        assert other.generation("access/") == before[0]

    @pytest.mark.parametrize("name", ESCAPES)
    def test_a_name_that_could_escape_is_refused(self, documents: Documents, name: str):
        uses: list[Callable[[], object]] = [
            lambda: documents.get(name),
            lambda: documents.put(name, b"x"),
            lambda: documents.remove(name),
            lambda: documents.update(name, lambda _: b"x"),
            lambda: documents.place(name),
        ]
        for use in uses:
            with pytest.raises(GatewayError, match="cannot be the name of a document"):
                use()

    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(
        st.lists(PART, min_size=1, max_size=4).map("/".join)
        | st.text(max_size=12)
        | st.text("./\\a", max_size=8)
    )
    def test_a_name_is_refused_or_names_one_document(self, documents: Documents, other: Documents, name: str):
        inner = all(part and part[0] in FIRST for part in name.split("/"))
        valid = inner and set(name) <= set(FIRST + "./")
        # Each example has a folder, because `a/b` and `a` exclude each other.
        folder = f"n{name.count('/')}-{len(name)}/{abs(hash(name))}"
        if not valid:
            with pytest.raises(GatewayError):
                documents.put(f"{folder}/{name}", b"x")
            with pytest.raises(GatewayError):
                documents.put(name, b"x")
            return
        documents.put(f"{folder}/{name}", name.encode(), durable=False)
        assert other.all(f"{folder}/") == {f"{folder}/{name}": name.encode()}
        assert name in other.place(f"{folder}/{name}")
