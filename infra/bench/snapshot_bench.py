"""`make bench-snapshot`: fetching a snapshot of 1.1 GB, in plain and TLS, beside raw sockets and client libraries.

    python infra/bench/snapshot_bench.py [--quick] [--rounds N] [--only plain tls verify]

The server is nginx on loopback. Our engine fetches into files in memory, verified. `fresh`: the memory is new in each
round. `kept`: every page of it was used before.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import checkpoint
import memory_folder
from nginx import Nginx, start_nginx
from percentiles import median
from pilotflame.snapshot.caching.memory import has_huge_pages
from report import Report, parser
from rounds import Entry, Rounds
from subject_process import SubjectProcess

PACKAGES = ("torch", "obstore", "xxhash", "h11", "safetensors")
QUICK_ROUNDS, ROUNDS = 2, 5
MEMORY = {"fresh": False, "kept": True}
CEILING, OURS = "raw sockets", "pilotflame"
LIBRARIES = {"http.client": "client_libraries:HttpClient", "obstore": "client_libraries:Obstore"}
# The least share of the ceiling, and the least ratio to the fastest library.
TARGETS = {
    "plain": {"fresh": (0.95, 1.0), "kept": (0.85, 1.0)},
    "tls": {"fresh": (0.85, 0.95), "kept": (0.85, 0.95)},
}


class Transfers:
    """The server, the object, and the processes of the subjects."""

    def __init__(self, server: Nginx, data: checkpoint.Checkpoint, rounds: int) -> None:
        self._server, self._data, self._rounds = server, data, rounds
        self._digest = checkpoint.file_digest(data.path)

    def beside_others(self, report: Report, group: str) -> None:
        """Enter for both kinds of memory our share of the ceiling, and our ratio to the fastest library."""
        with ExitStack() as stack:
            entries = [
                Entry(stack.enter_context(subject), f"{name}, {memory}")
                for memory, kept in MEMORY.items()
                for name, subject in self._subjects(kept, group == "tls").items()
            ]
            table = self._run(report, group, entries)
        for memory in MEMORY:
            ceiling, ours = f"{CEILING}, {memory}", f"{OURS}, {memory}"
            share, ratio = TARGETS[group][memory]
            report.add(f"{group}_{memory}_gb_s", median(table.rates(ours)), "GB/s")
            report.add(f"{group}_{memory}_ceiling_share", table.ratio(ours, ceiling), "", f">= {share}")
            known = [name for name in LIBRARIES if f"{name}, {memory}" in table.seconds]
            ratios = {name: table.ratio(ours, f"{name}, {memory}") for name in known}
            best = min(ratios, key=ratios.__getitem__)
            report.add(f"{group}_{memory}_client_ratio", ratios[best], f"x {best}", f">= {ratio}")

    def verify(self, report: Report) -> None:
        """Enter verify_cost: the seconds that verifying adds to a fetch of 1 GB. If the source sends 1 GB/s,
        this is also the share of the time that verifying adds.
        """
        with self._ours(kept=True, tls=False) as mine:
            entries = [Entry(mine, "verified"), Entry(mine, "not verified", {"verify": False})]
            table = self._run(report, "verify", entries, 3)
        pairs = zip(table.seconds["verified"], table.seconds["not verified"], strict=True)
        added_s = median([verified - unverified for verified, unverified in pairs])
        report.add("verify_cost", added_s / (self._data.size_bytes / 1e9), "", "<= 0.05")

    def _subjects(self, kept: bool, tls: bool) -> dict[str, SubjectProcess]:
        authority = str(self._server.authority) if tls else ""
        given: dict[str, Any] = {
            "host": "127.0.0.1", "port": self._server.tls_port if tls else self._server.port,
            "path": f"/{checkpoint.BUCKET}/{self._data.key}", "size_bytes": self._data.size_bytes,
            "digest": self._digest, "authority": authority, "kept": kept,
        }  # fmt: skip
        kinds = {CEILING: "raw_floor:Raw", **LIBRARIES}
        env = {"SSL_CERT_FILE": authority} if tls else {}
        found = {name: SubjectProcess(kind, env, **given) for name, kind in kinds.items()}
        return {**found, OURS: self._ours(kept, tls)}

    def _ours(self, kept: bool, tls: bool) -> SubjectProcess:
        base = self._server.tls_url if tls else self._server.url
        return SubjectProcess(
            "ours:Ours", url=f"{base}/{checkpoint.BUCKET}/{self._data.shape.name}",
            manifest=str(self._data.folder / checkpoint.MANIFEST), digest=self._digest, kept=kept,
            authority=str(self._server.authority) if tls else "",
        )  # fmt: skip

    def _run(self, report: Report, group: str, entries: list[Entry], times: int = 1) -> Rounds:
        table = Rounds(self._data.size_bytes)
        table.run(entries, times * self._rounds)
        table.enter(report, group)
        return table


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help=f"100 MB and {QUICK_ROUNDS} rounds")
    options.add_argument("--rounds", type=int, default=0, help=f"{ROUNDS} by default")
    groups = ["plain", "tls", "verify"]
    options.add_argument("--only", nargs="+", choices=groups, default=groups)
    arguments = options.parse_args()
    report = Report("bench-snapshot", packages=PACKAGES)
    data = checkpoint.checkpoint(checkpoint.QUICK if arguments.quick else checkpoint.FULL)
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    with memory_folder.mounted(), start_nginx(checkpoint.DATA) as server:
        folder = memory_folder.memory_folder()
        report.note(f"our files are in {folder}, huge pages: {has_huge_pages(folder)}")
        transfers = Transfers(server, data, rounds)
        for group in arguments.only:
            with report.part(group):
                if group == "verify":
                    transfers.verify(report)
                else:
                    transfers.beside_others(report, group)
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
