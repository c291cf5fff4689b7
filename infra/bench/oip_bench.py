"""Requests per CPU second of a model of the Open Inference Protocol, beside calls of the same function at /invoke.

    make bench-oip

A request has two tensors of 64 x 16 numbers, as bytes for the protocol and as JSON for /invoke, and the answer has two, too.
The CPU time includes the gateway and all processes of the function. Rounds are interleaved.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import hello
from control import gateway
from load import Request
from percentiles import median
from report import Report, parser
from servers import HERE, Server

FOLDER = HERE / "functions" / "triton" / "simple"
ROWS = 64
VALUES = list(range(16 * ROWS))
SHAPE = [ROWS, 16]


class Subject(hello.Subject):
    """A path of a gateway with a request of its own. Answers are not compared: their headers name the request."""

    def __init__(self, name: str, server: Server, path: str, body: bytes, headers: dict[str, str]) -> None:
        super().__init__(name, server, path)
        self._request = Request(server.url + path, body=body, headers=headers)


def as_bytes() -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of a request with binary tensors."""
    data = array("i", VALUES).tobytes()
    inputs = [
        {"name": name, "datatype": "INT32", "shape": SHAPE, "parameters": {"binary_data_size": len(data)}}
        for name in ("INPUT0", "INPUT1")
    ]
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    headers = {
        "Inference-Header-Content-Length": str(len(header)),
        "Content-Type": "application/octet-stream",
    }
    return header + data + data, headers


@contextmanager
def subjects() -> Iterator[list[Subject]]:
    """Run a gateway for each path, so that their CPU times are apart."""
    rows = [VALUES[start : start + 16] for start in range(0, len(VALUES), 16)]
    plain = json.dumps({"INPUT0": rows, "INPUT1": rows}).encode()
    with gateway() as (ours, control), gateway() as (other, other_control):
        control.deploy(str(FOLDER), name="simple")
        other_control.deploy(str(FOLDER), name="simple")
        yield [
            Subject("oip", ours, "/v2/models/simple/infer", *as_bytes()),
            Subject("invoke", other, "/invoke/simple", plain, {"Content-Type": "application/json"}),
        ]


def measure(report: Report, rounds: int) -> None:
    """Enter the figures of both paths, and the ratios in the same round."""
    with subjects() as entered:
        hello.run_rounds(report, entered, rounds)
    for subject in entered:
        report.add(f"{subject.name}_cpu_us_per_request", subject.median("cpu_us"), "us")
        report.add(f"{subject.name}_rps_{hello.CALLERS}", subject.median("per_second"), "/s")
    pairs = list(zip(entered[0].rounds, entered[1].rounds, strict=True))
    rates = [ours.per_second / invoke.per_second for ours, invoke in pairs]
    report.add("oip_rps_vs_invoke", median(rates), "of /invoke's", ">= 1")
    costs = [invoke.cpu_us / ours.cpu_us for ours, invoke in pairs]
    report.add("oip_requests_per_cpu_s", median(costs), "of /invoke's", ">= 1")


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=5)
    options = made.parse_args()
    report = Report("oip", packages=("numpy", "orjson"))
    with report.part("infer"):
        measure(report, options.rounds)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
