"""The weights of one worker: mapped before `setup`, awaited while they arrive, pinned and parked."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from statistics import mode
from typing import Any

from ....errors import PilotflameError
from ....snapshot.named import Snapshots
from ...ground.settings.resources import CONTEXT_MB
from ..link.connection import Link
from ..link.frames import FrameKind
from ..link.worker_spec import WorkerSpec
from . import devices
from .owned_thread import start_thread


class WorkerWeights:
    """The snapshots of one worker. All methods can also be called without snapshots."""

    def __init__(self, snapshots: Snapshots | None, spec: WorkerSpec, *, shared: bool) -> None:
        """`shared` is True if threads or tasks beside the handler's call may use the weights. A gate, which applies to one thread
        only, does not make them wait.
        """
        self.snapshots, self._spec = snapshots, spec
        self._shared = shared
        self.gate: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        """Returns a context in which each torch operation waits until the weights that it reads have arrived."""
        if snapshots is not None:
            self.gate = snapshots.gate
        self._dtype = ""

    def bind(self, link: Link, fail: Callable[[], object]) -> None:
        """Set the link for reports. A thread calls `fail` if weights do not arrive."""
        self._link, self._fail = link, fail

    @property
    def arriving(self) -> bool:
        """True while bytes of the weights are still on their way."""
        return self.snapshots is not None and self.snapshots.arriving

    def find_dtype(self) -> None:
        """Find the dtype before ACTIVATE, because this takes as long as mapping the weights (0.7 ms)."""
        self._dtype = most_common_dtype(self.snapshots)

    def facts(self) -> dict[str, Any]:
        """Return the facts about the weights and their device that READY reports."""
        head: dict[str, Any] = {"device": devices.describe(), "dtype": self._dtype}
        if self.snapshots is not None and (copies := _copies(self.snapshots)):
            head["copies"] = copies
        return head

    def blank(self) -> None:
        """Set the weights to zeros, for `rehearse`."""
        if self.snapshots is not None:
            self.snapshots.blank()

    def pin(self, stop: Callable[[], bool]) -> None:
        """Pin the weights for their copy to a device, until `stop()`. Raise what `Snapshots.pin` raises."""
        if self.snapshots is not None:
            self.snapshots.pin(stop)

    def open(self, by_s: float | None) -> None:
        """Limit the memory of GPUs, and map the weights. `by_s` is when fetched weights must have arrived, in monotonic seconds.

        Bytes of the weights may still be arriving when this method returns, and also when `follow` returns.
        """
        if self._spec.resources.gpus:
            # Set the limit again, because the rehearsal may have had another limit.
            limit_memory(self._spec.resources.gpu_memory_mb)
        if self.snapshots is None:
            return
        # Threads beside the main thread, which the rehearsal has started, may use the weights.
        self._shared = self._shared or threading.active_count() > 1 or self._spec.wait_for_weights
        self.snapshots.open(by_s)

    def follow(self) -> None:
        """Watch weights that are still arriving, in a thread. Wait for all of them here if the settings say so, or if the
        weights are shared and the function has no gate of its own.
        """
        if self.snapshots is not None and self.snapshots.arriving:
            start_thread(self._await, "weights")
            if self._spec.wait_for_weights or (self._shared and not self.snapshots.gated):
                self.snapshots.wait()

    def _await(self) -> None:
        """Wait for all weights. If they do not arrive, drain: the next worker starts with another fetch.

        torch reports the failure of a device as a RuntimeError.
        """
        if self.snapshots is None:
            return
        try:
            self.snapshots.wait()
        except (PilotflameError, RuntimeError) as error:
            sys.stderr.write(f"the weights did not arrive: {error}\n")
            self._fail()
        else:
            for copy in _copies(self.snapshots):
                self._link.send_json(FrameKind.COPIED, 0, copy)


def limit_memory(memory_mb: int | None) -> None:
    """Limit what torch may allocate on each GPU if the process may use `memory_mb` there. The context takes the rest."""
    devices.limit_memory(None if memory_mb is None else (memory_mb - CONTEXT_MB) << 20)


def _copies(snapshots: Snapshots) -> list[dict[str, Any]]:
    """Return, for each snapshot with weights on a device, how long ago its copy began and how long the copy took.

    "took_s" is None while the copy runs. "context" has the same two numbers for the device's context: how long ago its
    creation began ("ago_s"), and how long the creation took ("took_s").
    """
    found, now_s = [], time.monotonic()
    for name in snapshots:
        if (copied := snapshots[name].modules.copied) is not None:
            started_s, ended_s, (begun_s, made_s) = copied
            if not (ended_s or snapshots[name].arriving):
                ended_s = now_s
            took_s = ended_s - started_s if ended_s else None
            context = {"ago_s": now_s - begun_s, "took_s": made_s - begun_s}
            found.append({"name": name, "ago_s": now_s - started_s, "took_s": took_s, "context": context})
    return found


def most_common_dtype(snapshots: Snapshots | None) -> str:
    """Return the most common dtype of the snapshots' tensors, or "" if there are no tensors."""
    manifests = [snapshots[name].manifest for name in snapshots] if snapshots is not None else []
    dtypes = [tensor.dtype for manifest in manifests for tensor in manifest.tensors]
    return mode(dtypes) if dtypes else ""
