"""Whole loaders beside each other: from a served object to tensors on the CPU, in one go.

    python infra/bench/loaders.py [--quick] [--rounds N]

Each is a lane (a process of its own, imports off the clock) and gives every tensor of the checkpoint; in the first
turn all are compared with the file's digests, off the clock.
"""

from __future__ import annotations

import argparse
import io
import sys
from contextlib import ExitStack
from typing import Any

import checkpoint
import xxhash
from client import s3_client
from clients import CEILING, job_of
from lane import Lane
from nginx import Nginx, start_nginx
from raw_floor import file_digest
from rounds import Rounds, plain

TENSORIZER, BOTO3 = "tensorizer", "boto3 + safetensors.load"
RUNAI, RUNAI_HUGE = "Run:ai streamer", "Run:ai streamer, huge pages"
NAMES = (TENSORIZER, RUNAI, RUNAI_HUGE, BOTO3)

# Run:ai's buffers come from torch and from malloc. These variables make both advise huge pages (madvise). glibc and
# torch read them from the environment at their start.
HUGE = {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class Loader:
    """The common part of the loaders: the tensors of the turn, and the check that they are right."""

    def __init__(self, url: str, key: str, digests: dict[str, str]) -> None:
        import torch  # noqa: PLC0415

        self.torch = torch
        self.url, self.key = url, key
        self._digests = digests
        self.tensors: dict[str, Any] = {}

    def check(self) -> None:
        found = {name: self._digest(tensor) for name, tensor in self.tensors.items()}
        if found != self._digests:
            wrong = [name for name in self._digests if found.get(name) != self._digests[name]]
            raise RuntimeError(f"{len(wrong)} tensors are not the file's, such as {wrong[:3]}")

    def clear(self) -> None:
        self.tensors = {}

    def _digest(self, tensor: Any) -> str:
        flat = tensor.detach().contiguous().view(self.torch.uint8).numpy()
        return xxhash.xxh3_128_hexdigest(memoryview(flat).cast("B"))


class Tensorizer(Loader):
    """`TensorDeserializer` over HTTP (its own curl), eager, to the CPU."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        import tensorizer  # noqa: PLC0415

        self._tensorizer = tensorizer

    def run(self) -> None:
        loaded = self._tensorizer.TensorDeserializer(f"{self.url}/{self.key}", device="cpu")
        self.tensors = dict(loaded.items())
        loaded.close()


class Runai(Loader):
    """`SafetensorsStreamer` from the S3 endpoint, with its defaults. The yielded tensors are kept without a copy: the
    streamer gives its buffers away with them."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        import runai_model_streamer  # noqa: PLC0415

        self._streamer = runai_model_streamer.SafetensorsStreamer

    def run(self) -> None:
        with self._streamer() as streamer:
            streamer.stream_file(f"s3://{self.key}")
            self.tensors = dict(streamer.get_tensors())


class Boto3(Loader):
    """`download_fileobj` into memory, then `safetensors.torch.load`."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        import safetensors.torch  # noqa: PLC0415

        self._load = safetensors.torch.load
        self._client = s3_client(self.url, 10)

    def run(self) -> None:
        bucket, _, key = self.key.partition("/")
        body = io.BytesIO()
        self._client.download_fileobj(bucket, key, body)
        self.tensors = self._load(body.getvalue())


def loader_lanes(server: Nginx, data: checkpoint.Checkpoint) -> list[Lane]:
    given: dict[str, Any] = {"url": server.url, "digests": data.digests()}
    bucket = checkpoint.BUCKET
    aws = {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }
    safetensors: dict[str, Any] = {"key": f"{bucket}/{data.key}", **given}
    tensors: dict[str, Any] = {"key": f"{bucket}/{data.key_of(checkpoint.TENSORIZER)}", **given}
    return [
        Lane(TENSORIZER, "loaders:Tensorizer", **tensors),
        Lane(RUNAI, "loaders:Runai", env=aws, **safetensors),
        Lane(RUNAI_HUGE, "loaders:Runai", env={**aws, **HUGE}, **safetensors),
        Lane(BOTO3, "loaders:Boto3", **safetensors),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare loaders on one object.")
    parser.add_argument("--quick", action="store_true", help="100 MB and 2 rounds")
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    data = checkpoint.checkpoint(checkpoint.QUICK if arguments.quick else checkpoint.FULL)
    with start_nginx(checkpoint.DATA) as server, ExitStack() as stack:
        job = job_of(server, data, file_digest(data.path))
        lanes = [Lane(CEILING, "raw_floor:Raw", kept=False, **job), *loader_lanes(server, data)]
        for lane in lanes:
            stack.enter_context(lane)
        table = Rounds(data.size_bytes, ceiling=CEILING)
        table.play(plain(lanes), arguments.rounds or (2 if arguments.quick else 5))
    table.print("loaders")
    return 0


if __name__ == "__main__":
    sys.exit(main())
