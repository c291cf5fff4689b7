"""Collects all differences between a module and a snapshot, and makes one error of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ...errors import SnapshotMismatch
from ..format.layout import some

_KEPT = 100

Difference = tuple[str, str, str]
"""A tensor's name, what the snapshot has, and what the module has."""


@dataclass(slots=True)
class Mismatches:
    """The names of the tensors that do not fit, in one list for each kind of difference."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[Difference] = field(default_factory=list)
    dtypes: list[Difference] = field(default_factory=list)
    unfilled: list[str] = field(default_factory=list)
    """Non-persistent buffers on the meta device that the snapshot does not hold."""
    lazy: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any((self.missing, self.unexpected, self.shapes, self.dtypes, self.unfilled, self.lazy))


def describe(
    found: Mismatches, module: str, stored: Collection[str], wanted: list[str], prefix: str
) -> SnapshotMismatch:
    """Return the error that names everything that does not fit. `module` is the name of the module's class.

    `stored` and `wanted` are all tensor names of the snapshot and of the module.
    """
    kinds = [kind for kind in _kinds(found) if kind[1]]
    misfits = [
        f"{len(names)} {'tensor is' if len(names) == 1 else 'tensors are'} {what} ({some(names, 3)})"
        for what, names, _ in kinds
    ]
    hint = _prefix_hint(found, stored, wanted, prefix)
    return SnapshotMismatch(
        f"The snapshot does not fit {module}: {'; '.join(misfits)}.",
        remedy=hint or " ".join(remedy for _, _, remedy in kinds),
        details={
            "missing": found.missing[:_KEPT],
            "unexpected": found.unexpected[:_KEPT],
            "shapes": [name for name, _, _ in found.shapes[:_KEPT]],
            "dtypes": [name for name, _, _ in found.dtypes[:_KEPT]],
        },
    )


def _kinds(found: Mismatches) -> list[tuple[str, list[str], str]]:
    """Return each kind of difference in words, with its tensors and its remedy."""
    dtypes = sorted({has for _, has, _ in found.dtypes})
    return [
        ("missing from it", found.missing, "Make the snapshot from a checkpoint of this very class."),
        ("in it but not in the module", found.unexpected,
         f'If the module does not need them, pass ignore=[r"{_pattern(found.unexpected)}"].'),
        ("of another shape", [f"{name} {has}, not {wants}" for name, has, wants in found.shapes],
         "Build the module from the config that belongs to the snapshot."),
        ("of another dtype", [f"{name} {has}, not {wants}" for name, has, wants in found.dtypes],
         f"Build the skeleton with the snapshot's types: dtype={' or '.join(dtypes)}."),
        ("a non-persistent buffer on the meta device that it does not hold", found.unfilled,
         'Build the module within skeleton(), not torch.device("meta"), and make such buffers '
         "with torch.zeros or torch.arange, not torch.empty."),
        ("lazy, without a shape yet", found.lazy, "Give lazy modules their sizes."),
    ]  # fmt: skip


def _pattern(unexpected: list[str]) -> str:
    heads = {name.split(".", 1)[0] for name in unexpected}
    return rf"^{min(heads)}\." if len(heads) == 1 and "." in unexpected[0] else "^(a|regex|of|their|names)$"


def _prefix_hint(found: Mismatches, stored: Collection[str], wanted: list[str], prefix: str) -> str:
    """Return the remedy if the names differ only by a prefix, on either side; else an empty string."""
    if not found.missing or not found.unexpected:
        return ""
    name = found.missing[0].removeprefix(prefix)
    heads = [key.removesuffix(name) for key in stored if key.endswith(f".{name}") or (prefix and key == name)]
    missing = [key.removeprefix(prefix) for key in found.missing]
    for head in heads:
        if all(head + key in stored for key in missing):
            ignore = [key for key in found.unexpected if not key.startswith(head)]
            more = f' and ignore=[r"{_pattern(ignore)}"]' if ignore else ""
            return f'The names differ by a prefix: pass prefix="{head}"{more}.'
    known, key = set(wanted), found.unexpected[0]
    for head in (name.removesuffix(key) for name in wanted if name.endswith(f".{key}")):
        if all(head + other in known for other in found.unexpected):
            path = head.removesuffix(".")
            return f"The snapshot is of the module's part {path!r}: plan and restore module.{path} instead."
    return ""
