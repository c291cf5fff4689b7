"""Collects all differences between a module and its snapshots, and describes them in one error."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from ...errors import SnapshotMismatch
from ..format.layout import some

_KEPT = 100

Difference = tuple[str, str, str]
"""A tensor's name, then its shape or dtype in the snapshot, then its shape or dtype in the module."""


@dataclass(slots=True)
class Mismatches:
    """The names of the tensors that do not fit, in one list for each kind of difference."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[Difference] = field(default_factory=list)
    dtypes: list[Difference] = field(default_factory=list)
    unfilled: list[str] = field(default_factory=list)
    """Non-persistent buffers on the meta device that the snapshot does not have."""
    lazy: list[str] = field(default_factory=list)
    untyped: list[str] = field(default_factory=list)
    """Tensors of a type or shape that torch does not have, each with the reason."""
    uncut: list[str] = field(default_factory=list)
    """Tensors that cannot be cut into the requested slices, each with the reason."""

    outside: list[str] = field(default_factory=list)
    """Tensors with bytes outside of the part of the snapshot that is fetched."""
    twice: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Tensors that are in several snapshots: the module's name of the tensor, and its name in each snapshot."""

    def __bool__(self) -> bool:
        return any(getattr(self, one.name) for one in fields(self))

    def add(self, other: Mismatches, label: str) -> None:
        """Add the mismatches of the snapshot with the name `label`, which is "" if there is only one snapshot."""
        of = f" of {label}" if label else ""
        for one in fields(self):
            kind: list[Any] = getattr(self, one.name)
            kind += [
                f"{item}{of}" if isinstance(item, str) else (f"{item[0]}{of}", *item[1:])
                for item in getattr(other, one.name)
            ]


class Names(NamedTuple):
    """The names of all tensors of a snapshot, and the prefix that is added to the module's names to find them."""

    stored: Collection[str]
    prefix: str


def describe(
    common: Mismatches, found: dict[str, Mismatches], module: str, names: dict[str, Names], wanted: list[str]
) -> SnapshotMismatch:
    """Return the error that names everything that does not fit. `module` is the name of the module's class.

    The keys of `found` and `names` are the names of the snapshots, or "" if there is only one snapshot. `common` has
    the mismatches that concern all snapshots. `wanted` are all tensor names of the module.
    """
    everything = Mismatches()
    everything.add(common, "")
    for label, one in found.items():
        everything.add(one, label)
    hints = (_prefix_hint(common, one, names[label], wanted, label) for label, one in found.items())
    subject = f"The snapshots {' and '.join(found)} do" if len(found) > 1 else "The snapshot does"
    kinds = [kind for kind in _kinds(everything, found) if kind[1]]
    misfits = [
        f"{len(names)} {'tensor is' if len(names) == 1 else 'tensors are'} {what} ({some(names, 3)})"
        for what, names, _ in kinds
    ]
    return SnapshotMismatch(
        f"{subject} not fit {module}: {'; '.join(misfits)}.",
        remedy=next(filter(None, hints), "") or " ".join(remedy for _, _, remedy in kinds),
        details={
            "missing": everything.missing[:_KEPT],
            "unexpected": everything.unexpected[:_KEPT],
            "shapes": [name for name, _, _ in everything.shapes[:_KEPT]],
            "dtypes": [name for name, _, _ in everything.dtypes[:_KEPT]],
            **({"twice": [name for name, _ in everything.twice[:_KEPT]]} if everything.twice else {}),
        },
    )


def _kinds(found: Mismatches, each: dict[str, Mismatches]) -> list[tuple[str, list[str], str]]:
    """Return the description, the tensors and the remedy of each kind of difference. `each` has the mismatches by snapshot."""
    dtypes = sorted({has for _, has, _ in found.dtypes})
    them = "it" if len(each) == 1 else "them"
    return [
        (f"missing from {them}", found.missing, "Make the snapshot from a checkpoint of this very class."),
        (f"in {them} but not in the module", found.unexpected,
         f"If the module does not need them, pass {_ignore({name: one.unexpected for name, one in each.items()})}."),
        ("in several of them", [f"{name} in {' and '.join(those)}" for name, those in found.twice],
         f"Let one give way to another, as with {_ignore(_one_of_two(found))}."),
        ("of another shape", [f"{name} {has}, not {wants}" for name, has, wants in found.shapes],
         "Build the module from the config that belongs to the snapshot."),
        ("of another dtype", [f"{name} {has}, not {wants}" for name, has, wants in found.dtypes],
         f"Build the skeleton with the snapshot's types: dtype={' or '.join(dtypes)}."),
        ("a non-persistent buffer on the meta device that it does not hold", found.unfilled,
         'Build the module within skeleton(), not torch.device("meta"), and make such buffers '
         "with torch.zeros or torch.arange, not torch.empty."),
        ("lazy, without a shape yet", found.lazy, "Give lazy modules their sizes."),
        ("of a type or shape that this torch does not have", found.untyped,
         "Save them as bytes (uint8), or leave them out of the module and pass `ignore`."),
        ("outside of the part that is fetched", found.outside,
         "Correct snapshot_part in pilotflame.toml, or the slices."),
        ("not divisible into the slices", found.uncut, "Give another slice, or restore the whole tensors."),
    ]  # fmt: skip


def _one_of_two(found: Mismatches) -> dict[str, list[str]]:
    """Return the name of a snapshot that shares tensors with others, with the names of these tensors in this snapshot."""
    chosen = min((name for _, those in found.twice for name in those), default="")
    return {chosen: [those[chosen] for _, those in found.twice if chosen in those]}


def _ignore(unexpected: dict[str, list[str]]) -> str:
    """Return the source text of the argument `ignore` for `unexpected`, which has the names of tensors by snapshot."""
    patterns = {name: f'[r"{_pattern(found)}"]' for name, found in unexpected.items() if found}
    if "" in patterns:
        return f"ignore={patterns['']}"
    return "ignore={" + ", ".join(f'"{name}": {one}' for name, one in patterns.items()) + "}"


def _pattern(unexpected: list[str]) -> str:
    heads = {name.split(".", 1)[0] for name in unexpected}
    return rf"^{min(heads)}\." if len(heads) == 1 and "." in unexpected[0] else "^(a|regex|of|their|names)$"


def _prefix_hint(common: Mismatches, found: Mismatches, names: Names, wanted: list[str], label: str) -> str:
    """Return the remedy if the names differ only by a prefix in the snapshot or in the module, else an empty string.

    `label` is the name of the snapshot, or "" if there is only one snapshot.
    """
    missing, stored, prefix = common.missing + found.missing, names.stored, names.prefix
    if not missing or not found.unexpected:
        return ""
    name = missing[0].removeprefix(prefix)
    heads = [key.removesuffix(name) for key in stored if key.endswith(f".{name}") or (prefix and key == name)]
    missing = [key.removeprefix(prefix) for key in missing]
    for head in heads:
        if all(head + key in stored for key in missing):
            ignored = [key for key in found.unexpected if not key.startswith(head)]
            more = f" and {_ignore({label: ignored})}" if ignored else ""
            given = f'prefixes={{"{label}": "{head}"}}' if label else f'prefix="{head}"'
            return f"The names differ by a prefix: pass {given}{more}."
    known, key = set(wanted), found.unexpected[0]
    for head in (name.removesuffix(key) for name in wanted if name.endswith(f".{key}")):
        if all(head + other in known for other in found.unexpected) and not label:
            path = head.removesuffix(".")
            return f"The snapshot is of the module's part {path!r}: plan and restore module.{path} instead."
    return ""
