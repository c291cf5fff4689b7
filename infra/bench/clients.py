"""HTTP clients on one object: who brings 1.1 GB from a fast server soonest, into fresh and into kept memory.

    python infra/bench/clients.py [--quick] [--rounds N]

The script behind the choice of raw sockets with h11 for the head (docs/snapshot-choices.md). Every client is a lane:
a process of its own, with imports, pools and kept memory off the clock. 8 connections and parts of 16 MiB for all,
except where the name says otherwise. Prints the tables and writes build/bench/clients.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import checkpoint
from lane import Lane
from nginx import Nginx, start_nginx
from raw_floor import file_digest
from rounds import Rounds, plain

RESULT = checkpoint.DATA.parent / "clients.json"
CEILING, KEPT_CEILING = "raw sockets, fresh", "raw sockets, kept"
FILE_CEILING, KEPT_FILE_CEILING = "raw sockets, fresh file", "raw sockets, kept file"
TLS_CEILING = "raw sockets + ssl"


def job_of(server: Nginx, data: checkpoint.Checkpoint, digest: str, tls: bool = False) -> dict[str, Any]:
    """Return the arguments that every client gets."""
    return {
        "host": "127.0.0.1",
        "port": server.tls_port if tls else server.port,
        "path": f"/{checkpoint.BUCKET}/{data.key}",
        "size_bytes": data.size_bytes,
        "digest": digest,
        "authority": str(server.authority) if tls else "",
    }


def ceilings(job: dict[str, Any]) -> list[Lane]:
    """Raw sockets, the measure of all others."""
    return [
        Lane(CEILING, "raw_floor:Raw", kept=False, **job),
        Lane(KEPT_CEILING, "raw_floor:Raw", kept=True, **job),
    ]


def file_ceilings(job: dict[str, Any]) -> list[Lane]:
    """Raw sockets into files where ours are: what fresh memory of that kind allows, and kept memory."""
    return [
        Lane(FILE_CEILING, "raw_floor:Raw", kept=False, file=True, **job),
        Lane(KEPT_FILE_CEILING, "raw_floor:Raw", kept=True, file=True, **job),
    ]


def library_lanes(job: dict[str, Any], ranges: list[tuple[int, int]]) -> list[Lane]:
    """The libraries, in plain: into fresh memory, and into kept memory."""
    lanes = []
    for kept, word in ((False, "fresh"), (True, "kept")):
        lanes += [
            Lane(f"http.client, {word}", "client:HttpClient", kept=kept, **job),
            Lane(f"boto3 ranges, {word}", "client:Boto3", kept=kept, **job),
            Lane(f"aiohttp, {word}", "client:Aiohttp", kept=kept, **job),
            Lane(f"AWS CRT, {word}", "client:Crt", kept=kept, **job),
        ]
    # What obstore gives back for the copies to kept memory may be the allocator's to keep.
    kept_parts = {"kept": True, "way": "parts", **job}
    return [
        *lanes,
        Lane("obstore by tensor, fresh", "client:Obstore", kept=False, way="tensors", ranges=ranges, **job),
        Lane("obstore by part, fresh", "client:Obstore", kept=False, way="parts", **job),
        Lane("obstore by part, kept", "client:Obstore", keep_freed=True, **kept_parts),
        Lane("obstore get_ranges, fresh", "client:Obstore", kept=False, way="ranges", ranges=ranges, **job),
    ]


def tls_lanes(job: dict[str, Any], ranges: list[tuple[int, int]]) -> list[Lane]:
    """The most important ones again, with TLS 1.3: into fresh memory, and into kept memory. All check certificates."""
    trusting = {"SSL_CERT_FILE": job["authority"]}
    lanes = []
    for kept, word in ((False, "fresh"), (True, "kept")):
        lanes += [
            Lane(f"{TLS_CEILING}, {word}", "raw_floor:Raw", kept=kept, **job),
            Lane(f"http.client, {word}", "client:HttpClient", kept=kept, **job),
            Lane(f"AWS CRT, {word}", "client:Crt", kept=kept, **job),
        ]
    obstore: dict[str, Any] = {"env": trusting, **job}
    return [
        *lanes,
        Lane("aiohttp, fresh", "client:Aiohttp", kept=False, **job),
        Lane(
            "obstore by tensor, fresh", "client:Obstore", kept=False, way="tensors", ranges=ranges, **obstore
        ),
        Lane("obstore by part, fresh", "client:Obstore", kept=False, way="parts", **obstore),
        Lane("obstore by part, kept", "client:Obstore", kept=True, way="parts", keep_freed=True, **obstore),
    ]


def measure(server: Nginx, data: checkpoint.Checkpoint, rounds: int) -> tuple[Rounds, Rounds]:
    """Plain and TLS tables."""
    digest = file_digest(data.path)
    ranges = [(begin, end) for _, begin, end in data.ranges()]
    tables = []
    for tls in (False, True):
        job = job_of(server, data, digest, tls)
        with ExitStack() as stack:
            lanes = tls_lanes(job, ranges) if tls else [*ceilings(job), *library_lanes(job, ranges)]
            for lane in lanes:
                stack.enter_context(lane)
            table = Rounds(data.size_bytes, ceiling=lanes[0].name)
            table.play(plain(lanes), rounds)
        tables.append(table)
    return tables[0], tables[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare HTTP clients on one object.")
    parser.add_argument("--quick", action="store_true", help="100 MB and 2 rounds")
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    data = checkpoint.checkpoint(checkpoint.QUICK if arguments.quick else checkpoint.FULL)
    with start_nginx(checkpoint.DATA) as server:
        clear, tls = measure(server, data, arguments.rounds or (2 if arguments.quick else 5))
    clear.print("HTTP clients, plain")
    tls.print("HTTP clients, TLS 1.3")
    RESULT.write_text(json.dumps({"plain": clear.as_rows(), "tls": tls.as_rows()}, indent=2) + "\n")
    print(f"written: {RESULT.relative_to(Path.cwd()) if RESULT.is_relative_to(Path.cwd()) else RESULT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
