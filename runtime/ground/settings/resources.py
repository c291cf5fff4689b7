"""Defines the limits for the resources of a function's workers. Zygotes import no other module of settings."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

# The memory that is set aside for the context of a process on a GPU, which stays when a worker is parked. This is an estimate: no GPU was measured.
CONTEXT_MB = 512

# The most processes and threads of a function in a container, or in a cgroup. It ends a fork bomb, and is far above
# the hundreds of threads that a worker has on a machine with many cores.
PIDS = 4096


class Resources(BaseModel, frozen=True, extra="forbid", strict=True):
    """The most that all workers of a function on one node may use together."""

    memory_mb: int | None = Field(None, ge=16, le=16 << 20, description="Memory in MiB.")
    cpus: float | None = Field(None, gt=0, le=1024, description="Processors, as 0.5 or 2.")
    tmp_mb: int | None = Field(
        None, ge=1, le=1 << 20, description="Temporary files in MiB; 1024 in a container by default."
    )
    gpus: int | None = Field(
        None,
        ge=0,
        le=64,
        description="GPUs of each worker, which the gateway chooses; by default all that there are.",
    )
    gpu_memory_mb: int | None = Field(
        None,
        ge=2 * CONTEXT_MB,
        le=16 << 20,
        description="MiB that a worker may use of each of its `gpus`, its context there included; by default the whole GPU.",
    )
    network: Literal["none", "bridge", "host"] | None = Field(
        None,
        description="The network that a container may use; none, the default: it reaches only its gateway.",
    )
    files: Literal["shared", "private"] = Field(
        "shared",
        description="private: a process sees no files of the gateway, and writes to its working directory, TMPDIR and stored prefixes only.",
    )

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        if self.gpu_memory_mb is not None and not self.gpus:
            raise ValueError(
                "gpu_memory_mb says how much of each GPU a worker uses, so gpus must be at least 1"
            )
        return self
