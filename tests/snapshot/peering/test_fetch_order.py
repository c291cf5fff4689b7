"""The fetch order for a snapshot: no circular waits, one node asks the bucket, and chunks are spread evenly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.snapshot.peering.fetch_order import (
    WHOLE,
    LineAnswer,
    Position,
    ahead,
    next_number,
    ranked,
    to_ask_again,
)

NODES = "abcde"


class Cluster:
    """Nodes that join the fetch order. Their messages are sent in any order. `lost` has the pairs (sender, receiver) whose messages
    are lost."""

    def __init__(self, lost: set[tuple[str, str]]) -> None:
        self.standings = {node: LineAnswer(node) for node in NODES}
        self.behind: dict[str, set[str]] = {}
        """For each node that has joined, the nodes that it takes chunks from."""
        self._lost = lost

    def joining(self, node: str) -> Generator[str | None]:
        """Let a node join. Before each message, yield the node that must have chosen its position before it answers, or None."""
        self.standings[node] = LineAnswer(node, choosing=True)
        found: dict[str, LineAnswer] = {}
        for other in self._reached(node, NODES):
            yield None
            found[other] = self.standings[other]
        own = Position(next_number(found.values()), node)
        self.standings[node] = LineAnswer(node, own)
        for other in self._reached(node, to_ask_again(found)):
            yield other
            found[other] = self.standings[other]
        self.behind[node] = set(ahead(own, found))

    def _reached(self, node: str, others: str | list[str]) -> list[str]:
        return [other for other in others if other != node and (node, other) not in self._lost]

    def run(self, data: st.DataObject, begun_late: set[str]) -> None:
        """Run all nodes in any order. Nodes in `begun_late` start only when all other nodes have joined."""
        waiting = {node: (self.joining(node), None) for node in NODES if node not in begun_late}
        late = {node: (self.joining(node), None) for node in NODES if node in begun_late}
        while waiting or late:
            if not waiting:
                waiting, late = late, {}
            able = [
                node
                for node, (_, other) in waiting.items()
                if not other or not self.standings[other].choosing
            ]
            node = data.draw(st.sampled_from(sorted(able)))
            steps, _ = waiting.pop(node)
            with_other = next(steps, "ended")
            if with_other != "ended":
                waiting[node] = (steps, with_other)


PAIRS = st.sets(st.tuples(st.sampled_from(NODES), st.sampled_from(NODES)))


def in_a_circle(behind: dict[str, set[str]]) -> bool:
    left = dict(behind)
    while free := [node for node, before in left.items() if not before & left.keys()]:
        for node in free:
            del left[node]
    return bool(left)


@given(st.data(), PAIRS, st.sets(st.sampled_from(NODES)))
def test_no_nodes_wait_for_each_other_whatever_is_lost(data: st.DataObject, lost: set, late: set) -> None:
    cluster = Cluster(lost)
    cluster.run(data, late)
    assert cluster.behind.keys() == set(NODES)
    assert not in_a_circle(cluster.behind)


@given(st.data(), st.sets(st.sampled_from(NODES)))
def test_one_asks_the_bucket_and_those_who_come_later_stand_behind(data: st.DataObject, late: set) -> None:
    cluster = Cluster(set())
    cluster.run(data, late)
    assert [len(before) for before in sorted(cluster.behind.values(), key=len)] == list(range(len(NODES)))
    assert all(set(NODES) - late <= cluster.behind[node] for node in late)


@given(st.sets(st.text(min_size=1), min_size=1), st.integers(0, 1 << 30))
def test_all_rank_alike_and_one_that_goes_changes_no_other_rank(nodes: set[str], chunk: int) -> None:
    order = ranked(nodes, "key", chunk)
    assert sorted(order) == sorted(nodes)
    assert list(order) == list(ranked(sorted(nodes), "key", chunk))
    gone = order[len(order) // 2]
    assert [node for node in order if node != gone] == list(ranked(nodes - {gone}, "key", chunk))


def test_chunks_are_spread_evenly() -> None:
    first = Counter(ranked(NODES, "key", chunk)[0] for chunk in range(5000))
    assert all(800 < first[node] < 1200 for node in NODES)


def test_whole_stands_before_all_and_what_others_say_is_checked() -> None:
    assert Position(1, "0" * 32) > WHOLE
    assert WHOLE.valid
    assert Position(1, "0" * 32).valid
    for wrong in (
        Position(0, "0" * 32),
        Position(-1, "whole"),
        Position(1 << 31, "0" * 32),
        Position(1, "../" * 11),
    ):
        assert not wrong.valid
