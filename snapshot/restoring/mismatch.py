"""What does not fit between a module and a snapshot, collected into one error."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ...errors import SnapshotMismatch

_SHOWN = 3
_KEPT = 100

Shape = tuple[int, ...]


@dataclass(slots=True)
class Mismatches:
    """All misfits, by kind."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[tuple[str, Shape, Shape]] = field(default_factory=list)
    """Name, the snapshot's, the module's."""
    dtypes: list[tuple[str, str, str]] = field(default_factory=list)
    unfilled: list[str] = field(default_factory=list)
    """Non-persistent buffers on meta that the snapshot does not hold."""
    lazy: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        kinds = (self.missing, self.unexpected, self.shapes, self.dtypes, self.unfilled, self.lazy)
        return any(kinds)


def describe(
    found: Mismatches, module: str, stored: Collection[str], wanted: list[str], prefix: str
) -> SnapshotMismatch:
    """Build the error that names all misfits. `stored` and `wanted` are all names, for a hint at a prefix."""
    hint = _prefix_hint(found, stored, wanted, prefix)
    return SnapshotMismatch(
        f"The snapshot does not fit {module}: {'; '.join(_misfits(found))}.",
        remedy=hint or " ".join(_remedies(found)),
        details={
            "missing": found.missing[:_KEPT],
            "unexpected": found.unexpected[:_KEPT],
            "shapes": [name for name, _, _ in found.shapes[:_KEPT]],
            "dtypes": [name for name, _, _ in found.dtypes[:_KEPT]],
        },
    )


def _misfits(found: Mismatches) -> list[str]:
    kinds = [
        ("missing from it", found.missing),
        ("in it but not in the module", found.unexpected),
        ("of another shape", [f"{name} {list(has)}, not {list(wants)}" for name, has, wants in found.shapes]),
        ("of another dtype", [f"{name} {has}, not {wants}" for name, has, wants in found.dtypes]),
        ("a non-persistent buffer on the meta device that it does not hold", found.unfilled),
        ("lazy, without a shape yet", found.lazy),
    ]
    return [f"{_count(names)} {what} ({_first(names)})" for what, names in kinds if names]


def _remedies(found: Mismatches) -> list[str]:
    remedies = []
    if found.missing:
        remedies.append("Make the snapshot from a checkpoint of this very class.")
    if found.unexpected:
        remedies.append(f'If the module does not need them, pass ignore=[r"{_pattern(found.unexpected)}"].')
    if found.shapes:
        remedies.append("Build the module from the config that belongs to the snapshot.")
    if found.dtypes:
        held = sorted({has for _, has, _ in found.dtypes})
        remedies.append(f"Build the skeleton with dtype={held[0]}." if len(held) == 1 else _mixed(held))
    if found.unfilled:
        remedies.append(
            'Build the module within skeleton(), not torch.device("meta"), and make such buffers '
            "with torch.zeros or torch.arange, not torch.empty."
        )
    if found.lazy:
        remedies.append("Give lazy modules their sizes.")
    return remedies


def _mixed(held: list[str]) -> str:
    return f"Build the skeleton with the snapshot's dtypes ({', '.join(held)}) per module."


def _pattern(unexpected: list[str]) -> str:
    heads = {name.split(".", 1)[0] for name in unexpected}
    return rf"^{min(heads)}\." if len(heads) == 1 and "." in unexpected[0] else "^(a|regex|of|their|names)$"


def _prefix_hint(found: Mismatches, stored: Collection[str], wanted: list[str], prefix: str) -> str:
    """The remedy, if everything is there under names longer or shorter by one common head; else empty."""
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
    return _inner_hint(found, wanted)


def _inner_hint(found: Mismatches, wanted: list[str]) -> str:
    known = set(wanted)
    key = found.unexpected[0]
    for head in (name.removesuffix(key) for name in wanted if name.endswith(f".{key}")):
        if all(head + other in known for other in found.unexpected):
            path = head.removesuffix(".")
            return f"The snapshot is of the module's part {path!r}: plan and restore module.{path} instead."
    return ""


def _count(names: list[str]) -> str:
    return f"{len(names)} {'tensor is' if len(names) == 1 else 'tensors are'}"


def _first(names: list[str]) -> str:
    shown = ", ".join(name[:160] for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
