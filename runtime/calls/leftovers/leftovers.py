"""Finds what an import and a build have left in a zygote, and decides whether its workers can be forked.

Workers can be forked if each fork can have its own copy of everything that was left. Each fork opens files again that are
only read, and gives a new seed to generators without a seed (`Leftovers.renew`). If anything else was left, the workers are
spawned: each of them imports and builds for itself (`Leftovers.reason`).
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import descriptors, processes
from .generators import Generators
from .import_watch import ImportWatch, lasting_thread_count, open_descriptors, watch_imports
from .owners import owners, paths, reachable

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
# The largest number of leftovers that `Leftovers.reason` names, and of things to move into `setup`.
MOST_NAMED = 4
MOST_CHARS = 200
_UNKNOWN = "the handler's import or `build`"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A thing that workers cannot share: its holder (`where`), the thing (`what`), and the code to move into `setup`."""

    where: str
    what: str
    moved: str

    def __str__(self) -> str:
        return f"{self.where} {self.what}"


class Leftovers:
    """The result of the search in one zygote."""

    def __init__(
        self, found: Collection[Leftover] = (), read: Collection[int] = (), renewals: Collection[Callable[[], object]] = ()
    ) -> None:  # fmt: skip
        self._found, self._read, self._renewals = found, read, renewals

    def renew(self) -> None:
        """In a forked child: open the files again that are only read, and reseed the generators without a seed."""
        descriptors.open_again(self._read)
        for renew in self._renewals:
            renew()

    def reason(self, took_s: float) -> str:
        """Return why workers cannot be forked, what that costs, and what to change; "" if they can be forked.

        `took_s` is how long the import and the build took.
        """
        if not self._found:
            return ""
        texts, moved = (
            list(dict.fromkeys(found))
            for found in (map(str, self._found), (one.moved for one in self._found))
        )
        more = f"; and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
        return (
            f"{'; '.join(texts[:MOST_NAMED])}{more}. Each start of a worker imports and builds again, which took {took_s:.2f} s"
            f" here. To have them forked, put {' and '.join(moved[:MOST_NAMED])} into setup(context) instead"
        )


class Watch:
    """Watches the import and the build of a handler."""

    def __init__(self, generators: Generators, imports: ImportWatch) -> None:
        self._generators, self._imports = generators, imports
        self._before = open_descriptors()

    def find(self, code: Path, tmp: Path, state: object = None, kept: Path | None = None) -> Leftovers:
        """Return what was left. `tmp` is the TMPDIR of this process, and `state` is what `build` returned. Descriptors of
        files below `kept` are this package's own. If the search fails, workers cannot be forked.
        """
        try:
            return self._searched(code, tmp, state, kept)
        except Exception as error:  # noqa: BLE001  the search may run code of the handler's objects
            failed = f"cannot be searched ({type(error).__name__}: {error})"[:MOST_CHARS]
            return Leftovers([Leftover(_UNKNOWN, failed, "what makes such objects")])

    def _searched(self, code: Path, tmp: Path, state: object, kept: Path | None) -> Leftovers:
        if (first := self._find(code, tmp, state, kept))._found:  # noqa: SLF001
            # Free garbage, which may keep descriptors open, because the collector is off in a zygote. Then search again.
            gc.collect()
            return self._find(code, tmp, state, kept)
        return first

    def _find(self, code: Path, tmp: Path, state: object, kept: Path | None) -> Leftovers:
        sorted_ = descriptors.sort(open_descriptors() - self._before, kept)
        objects = list(reachable(code, state))
        renewals, varying = self._generators.find(one for _, one in objects)
        things: dict[object, str] = {("descriptor", number): what for number, what in sorted_.shared.items()}
        if processes.has_children():
            things |= {("process", pid): processes.describe(pid) for pid in processes.children()}
        things |= {
            ("object", id(one)): f"a seed that may differ at each import ({type(one).__name__})"
            for one in varying
        }
        found = [*self._threads_and_devices(sorted_.devices), *_others(tmp)]
        for holder, path in paths(objects, tmp.parent, code):
            what = f"holds the path {path.removeprefix(f'{tmp.parent}{os.sep}')} of the import's own folder"
            found.append(Leftover(holder, what, "what makes the path"))
        if things:
            found += self._named(things, owners(code, state))
        return Leftovers(found, sorted_.read, renewals)

    def _named(self, things: dict[object, str], variables: dict[object, str]) -> Iterator[Leftover]:
        held: dict[str, list[str]] = {}
        for thing, what in things.items():
            module = (
                self._imports.opened.get(thing[1])
                if isinstance(thing, tuple) and thing[0] == "descriptor"
                else None
            )
            where = variables.get(thing) or (f"importing {module}" if module else _UNKNOWN)
            # Ignore an ended process that no variable refers to, because no code waits for it.
            if (where, what) != (_UNKNOWN, processes.ENDED):
                held.setdefault(where, []).append(what)
        for where, each in held.items():
            listed = ", ".join(dict.fromkeys(each))
            if where.startswith("importing "):
                yield Leftover(where, f"left {listed}", _line(where))
            elif where == _UNKNOWN:
                yield Leftover(where, f"left {listed}", "what makes it")
            else:
                moved = where.partition(" in ")[0] if where.startswith("`") else "it"
                yield Leftover(where, f"holds {listed}", f"what makes {moved}")

    def _threads_and_devices(self, devices: list[str]) -> Iterator[Leftover]:
        if devices:
            # The use of a device starts threads too, so name the device as the cause.
            are = "are" if len(devices) > 1 else "is"
            what = (
                f"{are} open after the build: the handler has used a device, and its context survives no fork"
            )
            yield Leftover(", ".join(devices), what, "what uses the device")
        elif lasting_thread_count() > 1:
            yield from describe_threads(self._imports.started)


def _others(tmp: Path) -> Iterator[Leftover]:
    for path in descriptors.shared_memory():
        yield Leftover(_UNKNOWN, f"left shared memory ({path or 'anonymous'})", "what makes it")
    for name in sorted(os.listdir(tmp)):  # noqa: PTH208  names
        yield Leftover(_UNKNOWN, f"left the temporary file or folder {name}", "what makes it")
    if any(signal.getitimer(timer)[0] for timer in _TIMERS):
        yield Leftover(_UNKNOWN, "left a timer", "signal.setitimer")


def describe_threads(started: dict[str, int]) -> Iterator[Leftover]:
    """Yield the cause of the threads: the modules in `started`. If there are none, name the threads."""
    what = "started threads, which no fork survives"
    if started:
        importing = [f"importing {module}" for module in started]
        yield Leftover(", ".join(importing), what, " and ".join(dict.fromkeys(map(_line, importing))))
        return
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if names:
        what = f"started threads ({', '.join(names)}), which no fork survives"
    yield Leftover(_UNKNOWN if names else "a native library", what, "what starts threads")


def _line(importing: str) -> str:
    return f"`import {importing.removeprefix('importing ').partition('.')[0]}`"


@contextmanager
def watch(generators: Generators) -> Iterator[Watch]:
    """Watch what the block imports and builds."""
    with generators.watch(), watch_imports(generators.on_import) as imports:
        yield Watch(generators, imports)
