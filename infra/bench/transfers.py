"""Ours beside the ceiling, the client libraries and the loaders: from a fast server on loopback to memory of this machine.

Every group is played in rounds of its own, the ceiling in each of them, the order rotated. Each contestant is a lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import checkpoint
import clients
import loaders
import ours
from clients import CEILING, FILE_CEILING, KEPT_CEILING, KEPT_FILE_CEILING, TLS_CEILING
from lane import Lane
from nginx import Nginx
from percentiles import median
from raw_floor import file_digest
from report import Report
from rounds import Entry, Rounds, plain

FRESH = "pilotflame, fresh files"
TOUCHED = ", touched memory"
FRESH_AFTER_SMALL = f"{FRESH}, touched as 4 KiB pages"
RECYCLED, RECYCLED_UNVERIFIED = "pilotflame, recycled files", "pilotflame, recycled files, not verified"
TENSORS = "pilotflame, fresh files, to tensors"
CACHED, SPARES = "pilotflame, through the cache, to tensors", "pilotflame, through the cache, spare files"
SMALL, SMALL_RECYCLED = "pilotflame, fresh files, 4 KiB pages", "pilotflame, recycled files, 4 KiB pages"
DISK = "pilotflame, onto disk"
_TURNS: dict[str, dict[str, Any]] = {"": {}, ", 8 connections": {"connections": 8}}
_OTHERS = (2, 4)
"""Connections of the ceiling besides the eight that the issue names."""


@dataclass(frozen=True)
class Ballasts:
    """Lanes that leave touched memory to the next contestant: in small pages, and in huge ones."""

    small: Lane
    huge: Lane

    @classmethod
    def start(cls, stack: ExitStack, size_bytes: int) -> Ballasts:
        """`stack` ends them."""
        small, huge = (
            stack.enter_context(
                Lane(f"ballast, huge={huge}", "ballast:Ballast", size_bytes=size_bytes, huge=huge)
            )
            for huge in (False, True)
        )
        return cls(small, huge)

    def before(self, entry: Entry) -> Entry:
        """The same contestant in memory that was touched just before, in pages of the size that it takes."""
        huge = entry.name.startswith("pilotflame") or entry.name in (FILE_CEILING, loaders.RUNAI_HUGE)
        return replace(entry, name=f"{entry.name}{TOUCHED}", before=self.huge if huge else self.small)


@dataclass(frozen=True)
class Field:
    """Where the contestants play: the server, the object, its digest, how often."""

    server: Nginx
    data: checkpoint.Checkpoint
    digest: str
    rounds: int

    def job(self, tls: bool = False) -> dict[str, Any]:
        return clients.job_of(self.server, self.data, self.digest, tls)

    def ours(self, tls: bool = False, **more: Any) -> Lane:
        return Lane("pilotflame", "ours:Ours", **ours.given(self.server, self.data, self.digest, tls), **more)


def field(server: Nginx, data: checkpoint.Checkpoint, rounds: int) -> Field:
    return Field(server, data, file_digest(data.path), rounds)


def ceiling(report: Report, where: Field) -> None:
    """Enters ceiling_share and reused_ceiling_share: twice the rounds, since these two are held to a few per cent."""
    with ExitStack() as stack:
        fresh, kept = (stack.enter_context(lane) for lane in clients.ceilings(where.job()))
        file, kept_file = (stack.enter_context(lane) for lane in clients.file_ceilings(where.job()))
        mine, recycled = stack.enter_context(where.ours()), stack.enter_context(where.ours(recycled=True))
        small = stack.enter_context(where.ours(small=True))
        small_recycled = stack.enter_context(where.ours(small=True, recycled=True))
        ballasts = Ballasts.start(stack, where.data.size_bytes)
        new = [Entry(fresh, CEILING), Entry(file, FILE_CEILING), Entry(mine, FRESH)]
        entries = [
            *new,
            *map(ballasts.before, new),
            Entry(mine, FRESH_AFTER_SMALL, before=ballasts.small),
            Entry(kept, KEPT_CEILING),
            Entry(kept_file, KEPT_FILE_CEILING),
            Entry(recycled, RECYCLED),
            *(Entry(fresh, f"{CEILING}, {count} connections", {"connections": count}) for count in _OTHERS),
            *(
                Entry(kept, f"{KEPT_CEILING}, {count} connections", {"connections": count})
                for count in _OTHERS
            ),
            Entry(recycled, RECYCLED_UNVERIFIED, {"verify": False}),
            Entry(small, SMALL),
            Entry(small_recycled, SMALL_RECYCLED),
        ]
        table = _play("ceiling", report, where, entries, 2 * where.rounds)
    report.add("ceiling_share", table.ratio(FRESH, CEILING), "", ">= 0.95")
    # Without a ballast, memory is untouched only as far as the machine has never used it.
    report.add("ceiling_share_untouched", table.ratio(FRESH, CEILING))
    fresh_touched, ceiling_touched = f"{FRESH}{TOUCHED}", f"{CEILING}{TOUCHED}"
    report.add("ceiling_share_touched", table.ratio(fresh_touched, ceiling_touched), "", ">= 0.95")
    report.add("ceiling_share_touched_small", table.ratio(FRESH_AFTER_SMALL, ceiling_touched))
    report.add("file_ceiling_share_untouched", table.ratio(FRESH, FILE_CEILING), "", ">= 0.95")
    report.add(
        "file_ceiling_share_touched", table.ratio(fresh_touched, f"{FILE_CEILING}{TOUCHED}"), "", ">= 0.95"
    )
    report.add("reused_file_ceiling_share", table.ratio(RECYCLED, KEPT_FILE_CEILING), "", ">= 0.85")
    report.add("ceiling_share_of_best", _share_of_best(table, FRESH, CEILING))
    report.add("ceiling_share_small_pages", table.ratio(SMALL, CEILING))
    report.add("reused_ceiling_share_small_pages", table.ratio(SMALL_RECYCLED, KEPT_CEILING))
    report.add("reused_ceiling_share", table.ratio(RECYCLED, KEPT_CEILING), "", ">= 0.85")
    report.add("reused_ceiling_share_of_best", _share_of_best(table, RECYCLED, KEPT_CEILING))
    for name, figure in {
        "ceiling": CEILING,
        "kept_ceiling": KEPT_CEILING,
        "ceiling_touched": ceiling_touched,
        "file_ceiling": FILE_CEILING,
        "file_ceiling_touched": f"{FILE_CEILING}{TOUCHED}",
        "kept_file_ceiling": KEPT_FILE_CEILING,
        "fresh": FRESH,
        "fresh_touched": fresh_touched,
        "recycled": RECYCLED,
    }.items():
        report.add(f"{name}_gb_s", median(table.rates(figure)), "GB/s")


def verify(report: Report, where: Field) -> None:
    """Enters verify_cost: pairs in alternating order, three times the rounds, since it is a difference of two.

    It is the time that verifying adds to 1 GB, in seconds: its share of the time of a source that sends 1 GB/s. The
    memory is kept, because first touches of fresh memory differ by more than that from turn to turn.
    """
    with where.ours(recycled=True) as mine:
        entries = [Entry(mine, RECYCLED), Entry(mine, RECYCLED_UNVERIFIED, {"verify": False})]
        table = _play("verify", report, where, entries, 3 * where.rounds, ceiling=RECYCLED_UNVERIFIED)
    pairs = zip(table.seconds[RECYCLED], table.seconds[RECYCLED_UNVERIFIED], strict=True)
    added_s = median([verified - unverified for verified, unverified in pairs])
    report.add("verify_cost", added_s / (where.data.size_bytes / 1e9), "", "<= 0.05")
    report.add("verify_cost_of_loopback", 1 - table.ratio(RECYCLED, RECYCLED_UNVERIFIED), "")


def libraries(report: Report, where: Field) -> None:
    """Enters best_client_ratio: memory as the machine has it, touched before, and kept."""
    ranges = [(begin, end) for _, begin, end in where.data.ranges()]
    with ExitStack() as stack:
        rivals = [*clients.ceilings(where.job()), *clients.library_lanes(where.job(), ranges)]
        for lane in rivals:
            stack.enter_context(lane)
        mine, recycled = stack.enter_context(where.ours()), stack.enter_context(where.ours(recycled=True))
        ballasts = Ballasts.start(stack, where.data.size_bytes)
        new = [*plain(lane for lane in rivals if lane.name.endswith("fresh")), Entry(mine, FRESH)]
        reused = [*plain(lane for lane in rivals if lane.name.endswith("kept")), Entry(recycled, RECYCLED)]
        entries = [*new, *map(ballasts.before, new), *reused]
        table = _play("clients", report, where, entries, where.rounds)
    names = [lane.name for lane in rivals if lane.name not in (CEILING, KEPT_CEILING)]
    fresh = [name for name in names if name.endswith("fresh")]
    kept = [name for name in names if name.endswith("kept")]
    touched = [f"{name}{TOUCHED}" for name in fresh]
    _enter_best(report, table, "best_client_ratio", FRESH, fresh, ">= 1.0")
    _enter_best(report, table, "best_client_ratio_touched", f"{FRESH}{TOUCHED}", touched, ">= 1.0")
    _enter_best(report, table, "best_client_ratio_reused", RECYCLED, kept, ">= 1.0")


def tls(report: Report, where: Field) -> None:
    """Enters tls_client_ratio and tls_ceiling_share: TLS, with the default number of connections and with 8.

    Every client checks the certificate. Fresh memory beside fresh memory, touched beside touched, kept beside kept.
    """
    ranges = [(begin, end) for _, begin, end in where.data.ranges()]
    with ExitStack() as stack:
        rivals = clients.tls_lanes(where.job(tls=True), ranges)
        for lane in rivals:
            stack.enter_context(lane)
        mine = [stack.enter_context(where.ours(tls=True, recycled=recycled)) for recycled in (False, True)]
        ballasts = Ballasts.start(stack, where.data.size_bytes)
        new, reused = (
            [
                *plain(lane for lane in rivals if lane.name.endswith(word)),
                *(Entry(lane, f"{name}{told}", turn) for told, turn in _TURNS.items()),
            ]
            for lane, name, word in zip(mine, (FRESH, RECYCLED), ("fresh", "kept"), strict=True)
        )
        entries = [*new, *map(ballasts.before, new), *reused]
        table = _play("tls", report, where, entries, where.rounds, ceiling=f"{TLS_CEILING}, fresh")
    names = [lane.name for lane in rivals if not lane.name.startswith(TLS_CEILING)]
    for name, kind, word, memory in (
        (FRESH, "", "fresh", ""),
        (FRESH, "_touched", "fresh", TOUCHED),
        (RECYCLED, "_reused", "kept", ""),
    ):
        known = [f"{rival}{memory}" for rival in names if rival.endswith(word)]
        for told, count in zip(_TURNS, ("", "_8"), strict=True):
            own = f"{name}{told}{memory}"
            _enter_best(report, table, f"tls_client_ratio{kind}{count}", own, known, ">= 0.95")
            share = table.ratio(own, f"{TLS_CEILING}, {word}{memory}")
            report.add(f"tls_ceiling_share{kind}{count}", share, "", ">= 0.85")


def whole(report: Report, where: Field) -> None:
    """Enters best_loader_ratio: from the server to tensors."""
    with ExitStack() as stack:
        rivals = loaders.loader_lanes(where.server, where.data)
        raw, mine = Lane(CEILING, "raw_floor:Raw", kept=False, **where.job()), where.ours(tensors=True)
        for lane in (*rivals, raw, mine):
            stack.enter_context(lane)
        disk = stack.enter_context(where.ours(disk=True))
        told = ours.given(where.server, where.data, where.digest)
        cached = stack.enter_context(Lane(CACHED, "ours:Cached", **told))
        spares = stack.enter_context(Lane(SPARES, "ours:Cached", spares=True, **told))
        ballasts = Ballasts.start(stack, where.data.size_bytes)
        new = [
            Entry(raw, CEILING),
            *plain(rivals),
            Entry(mine, TENSORS, {"tensors": True}),
            Entry(cached, CACHED),
        ]
        entries = [*new, *map(ballasts.before, new), Entry(disk, DISK), Entry(spares, SPARES)]
        table = _play("loaders", report, where, entries, where.rounds)
    touched = [f"{name}{TOUCHED}" for name in loaders.NAMES]
    _enter_best(report, table, "best_loader_ratio", TENSORS, loaders.NAMES, ">= 2")
    _enter_best(report, table, "best_loader_ratio_touched", f"{TENSORS}{TOUCHED}", touched, ">= 2")
    _enter_best(report, table, "best_loader_ratio_cached", CACHED, loaders.NAMES, "")
    _enter_best(report, table, "best_loader_ratio_cached_touched", f"{CACHED}{TOUCHED}", touched, "")
    _enter_best(report, table, "best_loader_ratio_spares", SPARES, loaders.NAMES, "")


def _play(
    group: str, report: Report, where: Field, entries: Sequence[Entry], rounds: int, ceiling: str = CEILING
) -> Rounds:
    table = Rounds(where.data.size_bytes, ceiling)
    table.play(entries, rounds)
    table.print(group)
    for row in table.as_rows():
        report.row(group=group, **row)
    mine = [name for name in table.failed if name.startswith("pilotflame")]
    if mine:
        raise RuntimeError(f"{mine} failed: {[table.failed[name] for name in mine]}")
    if table.failed:
        report.note(f"{group}: out, for they failed: {', '.join(table.failed)}")
    return table


def _share_of_best(table: Rounds, name: str, ceiling: str) -> float:
    """Beside the fastest of the ceilings in each round."""
    all_of_them = [ceiling, *(f"{ceiling}, {count} connections" for count in _OTHERS)]
    best = [min(turns) for turns in zip(*(table.seconds[each] for each in all_of_them), strict=True)]
    return median([fastest / own for fastest, own in zip(best, table.seconds[name], strict=True)])


def _enter_best(
    report: Report, table: Rounds, figure: str, own: str, rivals: Sequence[str], target: str
) -> None:
    known = [name for name in rivals if name in table.seconds]
    ratios = {name: table.ratio(own, name) for name in known}
    best = min(ratios, key=ratios.__getitem__)
    report.add(figure, ratios[best], "x", target)
    report.note(
        f"{figure}: the best was {best}; "
        + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    )
