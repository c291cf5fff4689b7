"""Defines the object that a handler receives as `context.snapshots`: the snapshots of a function by their names.

A worker opens, awaits and gates all snapshots together. A function with the setting `snapshot` has one snapshot, whose
name is "". Its handler receives this snapshot as `context.snapshot`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from threading import Thread
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import NoSuchSnapshot
from .adapters import Adapters
from .extras import needs
from .handle import Snapshot, gate_of

if TYPE_CHECKING:
    import torch

    from .format.manifest import Manifest

_NO_NAMES: Mapping[str, Any] = MappingProxyType({})


class Snapshots:
    """The snapshots of one function, on this node: `context.snapshots["style"]`. Iteration yields their names."""

    def __init__(self, snapshots: Iterable[Snapshot], adapters: Adapters | None = None) -> None:
        self.adapters = adapters if adapters is not None else Adapters()
        self._named = {one.name: one for one in snapshots}
        self.compare = self.adapters.compare or any(one.compares for one in self._named.values())
        """True if `check` compares bytes, because a snapshot or an adapter is in a folder of this machine."""
        # The snapshots with bytes that are not fetched or copied yet. Each call of `gate` removes complete snapshots.
        self._arriving: list[Snapshot] = []

    def __getitem__(self, name: str) -> Snapshot:
        """Return the snapshot with this name. Raise NoSuchSnapshot if there is none."""
        if (found := self._named.get(name)) is not None:
            return found
        fault = f"There is no snapshot {name!r} (there: {', '.join(self._named)})."
        raise NoSuchSnapshot(fault, remedy="Name it in [snapshots] of pilotflame.toml.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

    @property
    def only(self) -> Snapshot | None:
        """The snapshot of the setting `snapshot`. None if the function has named snapshots."""
        return self._named.get("")

    def skeleton(self) -> AbstractContextManager[None]:
        """Return a context in which new modules have parameters without memory. See `Snapshot.skeleton`."""
        return next(iter(self._named.values())).skeleton()

    def restore(
        self,
        module: torch.nn.Module,
        *,
        prefixes: Mapping[str, str] = _NO_NAMES,
        ignore: Mapping[str, Sequence[str]] = _NO_NAMES,
        cast: bool = False,
        device: str = "cpu",
    ) -> None:
        """Set the weights of a module from several snapshots, such as a base and an adapter.

        See `Snapshot.restore`. `prefixes` and `ignore` map the name of a snapshot to its `prefix` and `ignore`. If
        several snapshots have a tensor, a snapshot whose `ignore` fits the tensor's name does not supply it.
        Raise SnapshotMismatch if a tensor of the module is in no snapshot or in several, or does not fit, or
        if a snapshot has a tensor that the module does not have. The error names the tensors and the snapshots.
        """
        with needs("context.snapshots", "torch"):
            from .restoring.plan import Supply, make_plans  # noqa: PLC0415  only restoring loads torch

        for name in (*prefixes, *ignore):
            # Raises NoSuchSnapshot if there is no snapshot with this name.
            _ = self[name]
        supplies = {
            name: Supply(one.manifest, prefixes.get(name, ""), ignore.get(name, ()))
            for name, one in self._named.items()
        }
        for name, plan in make_plans(module, supplies, cast=cast, device=device).items():
            self._named[name].modules.apply(plan)

    # -- for workers

    def blank(self) -> None:
        """Set the weights of the modules that `build` restored to zeros, for a rehearsal."""
        for one in self._named.values():
            one.modules.blank()

    def pin(self, stop: Callable[[], bool]) -> None:
        """Pin the files of weights that go to a device, so that the copy takes less time. End early once `stop` returns True."""
        for one in self._named.values():
            one.pin(stop)

    def open(self, by_s: float | None = None) -> None:
        """Map the files of all snapshots and apply the plans that `build` made. See `Snapshot.open`."""
        for one in self._named.values():
            one.open(by_s)
        self._arriving = [one for one in self._named.values() if one.arriving]

    def check(self) -> None:
        """Raise SnapshotChanged if the handler may read other bytes than the manifests describe. See `Snapshot.check`."""
        for one in self._named.values():
            one.check()
        self.adapters.check()

    def park(self) -> int:
        """Free the device memory of the weights. Return the number of freed bytes.

        Weights on the host are not freed: they are pages of files, which the kernel evicts itself when it needs memory.
        Weights that the handler has changed, and the modules' other tensors on the device, are copied to the host.
        Nothing may use the modules until `unpark`. Raise SnapshotError if an upload of weights does not end in time.
        """
        slabs = [upload.slab for one in self._named.values() for upload in one.modules.uploads]
        return sum(one.modules.park(slabs) for one in self._named.values())

    def finish(self) -> None:
        """Wait until the devices have done all work of this process. Raise the error of a failed device."""
        for one in self._named.values():
            one.modules.finish()

    def unpark(self) -> None:
        """Copy the weights to their devices again. The modules keep their tensor objects, but at new addresses.

        The copy goes on after `unpark` returns. Before operations use the weights, call `wait`, or run the operations
        in a `gate` that was entered after `unpark`. Raise SnapshotError if a device has too little free memory. After such
        an error, call `unpark` again for the weights that are still parked.
        """
        for one in self._named.values():
            one.modules.unpark()
        self._arriving = [one for one in self._named.values() if one.arriving]

    @property
    def arriving(self) -> bool:
        """True while some bytes are not fetched or copied yet. Until then, operations outside a `gate` may read wrong bytes."""
        return any(one.arriving for one in self._named.values())

    @property
    def gated(self) -> bool:
        """True if the function itself uses gates for all snapshots that still arrive."""
        return all(one.gated for one in self._named.values() if one.arriving)

    def gate(self) -> AbstractContextManager[Any]:
        """Return a context in which each torch operation of this thread waits for the bytes of its tensors."""
        if self._arriving:
            self._arriving = [one for one in self._arriving if one.arriving]
        return gate_of([found for one in self._arriving for found in one.awaited()])

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all bytes. Raise what `Snapshot.wait` raises, for the first snapshot that fails."""
        if len(self._named) == 1:
            next(iter(self._named.values())).wait(timeout_s)
            return
        # Wait for each snapshot in a thread of its own: the last snapshot may fail at once while the first needs an hour.
        ended: SimpleQueue[Exception | None] = SimpleQueue()
        for one in self._named.values():
            Thread(target=_wait_for, args=(one, timeout_s, ended), name="snapshot-wait", daemon=True).start()
        for _ in self._named:
            if (error := ended.get()) is not None:
                raise error

    def record(self, run: Callable[[], Any]) -> dict[str, Manifest]:
        """Call `run`. Return each snapshot's manifest with the order in which `run` first read the tensors."""
        recorded: dict[str, Manifest] = {}

        def record_one(name: str, one: Snapshot, inner: Callable[[], Any]) -> None:
            recorded[name] = one.record(inner)

        for name, one in self._named.items():
            run = partial(record_one, name, one, run)
        run()
        return recorded

    def __repr__(self) -> str:
        return f"Snapshots({list(self._named.values())!r})"


def _wait_for(one: Snapshot, timeout_s: float | None, ended: SimpleQueue[Exception | None]) -> None:
    try:
        one.wait(timeout_s)
    except Exception as error:  # noqa: BLE001  raised by `Snapshots.wait`
        ended.put(error)
    else:
        ended.put(None)
