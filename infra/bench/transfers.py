"""Ours beside the ceiling, the client libraries and the loaders: from a fast server on loopback to memory of this machine.

Every group is played in rounds of its own, the ceiling in each of them, the order rotated. Everybody is a lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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

FRESH, UNVERIFIED = "pilotflame, fresh files", "pilotflame, fresh files, not verified"
FILE_CEILING_TOUCHED = f"{FILE_CEILING}, touched memory"
CEILING_TOUCHED, FRESH_TOUCHED = f"{CEILING}, touched memory", f"{FRESH}, touched memory"
RECYCLED, RECYCLED_UNVERIFIED = "pilotflame, recycled files", "pilotflame, recycled files, not verified"
TENSORS = "pilotflame, fresh files, to tensors"
CACHED, SPARES = "pilotflame, through the cache, to tensors", "pilotflame, through the cache, spare files"
SMALL, SMALL_RECYCLED = "pilotflame, fresh files, 4 KiB pages", "pilotflame, recycled files, 4 KiB pages"
DISK = "pilotflame, onto disk"
_EIGHT = ", 8 connections"
_OTHERS = (2, 4)
"""Connections of the ceiling besides the eight that the issue names."""


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
        ballast = stack.enter_context(Lane("ballast", "ballast:Ballast", size_bytes=where.data.size_bytes))
        entries = [
            Entry(fresh, CEILING),
            Entry(file, FILE_CEILING),
            Entry(mine, FRESH),
            Entry(fresh, CEILING_TOUCHED, before=ballast),
            Entry(file, FILE_CEILING_TOUCHED, before=ballast),
            Entry(mine, FRESH_TOUCHED, before=ballast),
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
    report.add("ceiling_share", table.ratio(FRESH, CEILING), "", ">= 0.85")
    # Without a ballast, memory is untouched only as far as the machine has never used it.
    report.add("ceiling_share_untouched", table.ratio(FRESH, CEILING))
    report.add("ceiling_share_touched", table.ratio(FRESH_TOUCHED, CEILING_TOUCHED), "", ">= 0.85")
    report.add("file_ceiling_share_untouched", table.ratio(FRESH, FILE_CEILING), "", ">= 0.95")
    report.add("file_ceiling_share_touched", table.ratio(FRESH_TOUCHED, FILE_CEILING_TOUCHED), "", ">= 0.95")
    report.add("reused_file_ceiling_share", table.ratio(RECYCLED, KEPT_FILE_CEILING), "", ">= 0.85")
    report.add("ceiling_share_of_best", _share_of_best(table, FRESH, CEILING))
    report.add("ceiling_share_small_pages", table.ratio(SMALL, CEILING))
    report.add("reused_ceiling_share_small_pages", table.ratio(SMALL_RECYCLED, KEPT_CEILING))
    report.add("reused_ceiling_share", table.ratio(RECYCLED, KEPT_CEILING), "", ">= 0.8")
    report.add("reused_ceiling_share_of_best", _share_of_best(table, RECYCLED, KEPT_CEILING))
    for name, figure in {
        "ceiling": CEILING,
        "kept_ceiling": KEPT_CEILING,
        "ceiling_touched": CEILING_TOUCHED,
        "file_ceiling": FILE_CEILING,
        "file_ceiling_touched": FILE_CEILING_TOUCHED,
        "kept_file_ceiling": KEPT_FILE_CEILING,
        "fresh": FRESH,
        "fresh_touched": FRESH_TOUCHED,
        "recycled": RECYCLED,
    }.items():
        report.add(f"{name}_gb_s", median(table.rates(figure)), "GB/s")


def verify(report: Report, where: Field) -> None:
    """Enters verify_cost: pairs in alternating order, three times the rounds, since it is a difference of two."""
    with where.ours() as mine:
        entries = [Entry(mine, FRESH), Entry(mine, UNVERIFIED, {"verify": False})]
        table = _play("verify", report, where, entries, 3 * where.rounds, ceiling=UNVERIFIED)
    report.add("verify_cost", 1 - table.ratio(FRESH, UNVERIFIED), "", "<= 0.03")


def libraries(report: Report, where: Field) -> None:
    """Enters best_client_ratio and best_client_ratio_reused."""
    ranges = [(begin, end) for _, begin, end in where.data.ranges()]
    with ExitStack() as stack:
        rivals = [*clients.ceilings(where.job()), *clients.library_lanes(where.job(), ranges)]
        for lane in rivals:
            stack.enter_context(lane)
        mine, recycled = stack.enter_context(where.ours()), stack.enter_context(where.ours(recycled=True))
        entries = [*plain(rivals), Entry(mine, FRESH), Entry(recycled, RECYCLED)]
        table = _play("clients", report, where, entries, where.rounds)
    names = [lane.name for lane in rivals if lane.name not in (CEILING, KEPT_CEILING)]
    fresh = [name for name in names if name.endswith("fresh")]
    kept = [name for name in names if name.endswith("kept")]
    _enter_best(report, table, "best_client_ratio", FRESH, fresh, ">= 1.0")
    _enter_best(report, table, "best_client_ratio_reused", RECYCLED, kept, ">= 1.2")


def tls(report: Report, where: Field) -> None:
    """Enters tls_client_ratio and tls_ceiling_share: TLS, with the default number of connections and with 8.

    Everybody checks the certificate. Fresh memory beside fresh memory, kept beside kept.
    """
    ranges = [(begin, end) for _, begin, end in where.data.ranges()]
    with ExitStack() as stack:
        rivals = clients.tls_lanes(where.job(tls=True), ranges)
        for lane in rivals:
            stack.enter_context(lane)
        mine = [stack.enter_context(where.ours(tls=True, recycled=recycled)) for recycled in (False, True)]
        entries = [
            *plain(rivals),
            *(
                Entry(lane, f"{name}{told}", turn)
                for lane, name in zip(mine, (FRESH, RECYCLED), strict=True)
                for told, turn in (("", {}), (_EIGHT, {"connections": 8}))
            ),
        ]
        table = _play("tls", report, where, entries, where.rounds, ceiling=f"{TLS_CEILING}, fresh")
    names = [lane.name for lane in rivals if not lane.name.startswith(TLS_CEILING)]
    for name, kind, word in ((FRESH, "", "fresh"), (RECYCLED, "_reused", "kept")):
        known = [rival for rival in names if rival.endswith(word)]
        for told, count in (("", ""), (_EIGHT, "_8")):
            _enter_best(report, table, f"tls_client_ratio{kind}{count}", f"{name}{told}", known, ">= 0.95")
            share = table.ratio(f"{name}{told}", f"{TLS_CEILING}, {word}")
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
        entries = [
            Entry(raw, CEILING),
            *plain(rivals),
            Entry(mine, TENSORS, {"tensors": True}),
            Entry(disk, DISK),
            *plain([cached, spares]),
        ]
        table = _play("loaders", report, where, entries, where.rounds)
    _enter_best(report, table, "best_loader_ratio", TENSORS, loaders.NAMES, ">= 2")
    _enter_best(report, table, "best_loader_ratio_cached", CACHED, loaders.NAMES, "")
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
