"""The command that measures a source of weights: `pilotflame snapshot bench`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from . import display, options
from .transfers import counted, fetching, open_snapshot

if TYPE_CHECKING:
    from ...snapshot.fetching.bench import Bench, Round
    from ...snapshot.format.manifest import Manifest


@click.command()
@click.argument("url", metavar="URL")
@click.option(
    "--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="How often to read it."
)
@fetching
@options.as_json
def bench(*, url: str, rounds: int, connections: int | None, part_mib: int | None, as_json: bool) -> None:
    """Read the snapshot at URL several times into memory, verified, and say how fast that went.

    Nothing is kept. The first round meets fresh memory and an unknown source, the others neither. Where URL is plain
    http, 8 bare sockets read the largest file after each round: the ceiling.

    \b
    Example:
      pilotflame snapshot bench s3://bucket/models/llama --rounds 5
    """
    from ...snapshot.fetching.bench import bench as measure  # noqa: PLC0415  pydantic and xxhash take time to import

    source, manifest = open_snapshot(url)
    with display.progress(f"reading {source.url}") as progress:
        found = measure(
            manifest, source, rounds=rounds, connections=connections,
            part_bytes=None if part_mib is None else part_mib << 20, progress=progress,
        )  # fmt: skip
    if as_json:
        return display.print_json(_facts(source.url, manifest, found))
    click.echo(f"{source.url}: {display.size(manifest.total_bytes)}, {counted(rounds, 'round')}")
    display.print_table(("", "first round", _others(rounds)), _rows(found))
    for line in _lines(manifest, found):
        click.echo(line)
    return None


def _others(rounds: int) -> str:
    return "others" if rounds <= 2 else f"median of the other {rounds - 1}"


def _rows(found: Bench) -> list[tuple[str, str, str]]:
    values: list[tuple[str, Callable[[Round], float | None], Callable[[float], str]]] = [
        ("time", lambda item: item.seconds, lambda value: display.milliseconds(value * 1000)),
        ("rate", lambda item: item.bytes_per_s, lambda value: f"{display.size(value)}/s"),
        ("share of the ceiling", lambda item: item.ceiling_share, lambda value: f"{value:.0%}"),
        ("first tensor after", lambda item: item.first_tensor_s, lambda value: display.milliseconds(value * 1000)),
        ("connections", lambda item: item.stats.connections, lambda value: f"{value:.0f}"),
        ("retries", lambda item: item.stats.retries, lambda value: f"{value:.0f}"),
        ("stalls", lambda item: item.stats.stalls, lambda value: f"{value:.0f}"),
    ]  # fmt: skip
    rows = []
    for name, value, shown in values:
        cells = [value(found.rounds[0]), found.median(value)]
        first, others = ("-" if cell is None else shown(cell) for cell in cells)
        rows.append((name, first, others))
    return rows


def _lines(manifest: Manifest, found: Bench) -> list[str]:
    lines = [f"settled at {counted(found.connections, 'connection')}"]
    if found.latency_s is not None:
        lines.append(f"first byte after {display.milliseconds(found.latency_s * 1000)} on a kept connection")
    if (tensor := found.first_tensor) is not None:
        order = "recorded" if manifest.first_touch else "not recorded: as the files have them"
        share = tensor.size_bytes / manifest.total_bytes
        lines.append(
            f"first tensor: {tensor.name}, {display.size(tensor.size_bytes)}, {share:.1%} of the bytes (order {order})"
        )
    ceilings = [item.ceiling_bytes_per_s for item in found.rounds if item.ceiling_bytes_per_s]
    if ceilings:
        lines.append(f"ceiling: {display.size(max(ceilings))}/s by 8 bare sockets, at best")
    return lines


def _facts(url: str, manifest: Manifest, found: Bench) -> dict[str, Any]:
    tensor = found.first_tensor
    return {
        "url": url,
        "digest": manifest.digest,
        "bytes": manifest.total_bytes,
        "connections": found.connections,
        "latency_s": found.latency_s,
        "first_tensor": None if tensor is None else {
            "name": tensor.name, "bytes": tensor.size_bytes, "share": tensor.size_bytes / manifest.total_bytes,
            "recorded": bool(manifest.first_touch),
        },
        "rounds": [_round(item) for item in found.rounds],
        "others": {name: found.median(lambda item, name=name: _round(item)[name]) for name in _MEASURED},  # type: ignore[misc]
    }  # fmt: skip


_MEASURED = ("seconds", "bytes_per_s", "first_tensor_s", "ceiling_bytes_per_s", "ceiling_share")


def _round(item: Round) -> dict[str, Any]:
    stats = item.stats
    measured = {name: getattr(item, name) for name in _MEASURED}
    return {**measured, "connections": stats.connections, "requests": stats.requests, "retries": stats.retries,
            "stalls": stats.stalls}  # fmt: skip


COMMANDS = (bench,)
