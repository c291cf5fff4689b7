"""The CPU time of a warm hello with the plugin `opentelemetry`: off, and with 1 % of the requests sampled.

    make bench-otel

Three gateways run at the same time and take turns within each round. Each round has new gateways. `without` has no such plugin,
`off` has it without an endpoint, and `sampled` exports spans and metrics to a collector that takes everything. The CPU time is of
all threads of the gateway, so that it includes the exporters, and of the workers. The ratios are taken round by round: the
median is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import http.server
import sys
import threading
from collections.abc import Iterator, Mapping

import uvloop
from path_cost import UNITS, run_warm, started
from percentiles import median, percentile
from pilotflame.entry_points import APIS, DIALECTS, SOURCES, offers
from report import Report, parser
from rounds import rotated

SHARE = "0.01"
OFF = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "",
}
# The largest difference of the ratio from 1, while the plugin is off.
OFF_MOST, SAMPLED_MOST = "<= 0.01", "<= 1.05"


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what exporters send, and counts the requests for spans."""

    exports = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        Collector.exports += self.path == "/v1/traces"
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write no log."""


@contextlib.contextmanager
def collector() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def environments(url: str) -> dict[str, Mapping[str, str]]:
    """Return the variables of each gateway by its name."""
    others = ",".join(sorted({name for group in (APIS, DIALECTS, SOURCES) for name in offers(group)}))
    sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": SHARE}
    return {
        "without": {**OFF, "PILOTFLAME_PLUGINS": others},
        "off": OFF,
        "sampled": {"OTEL_EXPORTER_OTLP_ENDPOINT": url, **sampler},
    }


def enter(report: Report, rounds_s: Mapping[str, list[float]]) -> None:
    unit, factor = UNITS["hello"]
    for name, seconds in rounds_s.items():
        report.add(f"{name}_{unit}", median(seconds) * factor, f"{unit} CPU")
        report.row(side=name, seconds=seconds)
    for name, target in (("off", ""), ("sampled", SAMPLED_MOST)):
        ratios = [own / without for without, own in zip(rounds_s["without"], rounds_s[name], strict=True)]
        report.add(f"{name}_ratio", median(ratios), "x", target)
        if name == "off":
            report.add("off_difference", abs(median(ratios) - 1), "x", OFF_MOST)
        report.add(f"{name}_ratio_p25", percentile(ratios, 0.25), "x")
        report.add(f"{name}_ratio_p75", percentile(ratios, 0.75), "x")
    report.add("exports", Collector.exports, "requests", ">= 1")


def run_round(variables: Mapping[str, Mapping[str, str]], options: argparse.Namespace) -> dict[str, float]:
    """Start a gateway of each kind, and return the seconds of a call. Two gateways of one kind may differ by 4 %."""
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(started(name, sys.executable, env)) for name, env in variables.items()]
        for one in sides:
            one.cpu.wait_idle()
        uvloop.run(run_warm(sides, options))
    return {one.name: one.rounds_s[0] for one in sides}


def run(options: argparse.Namespace) -> dict[str, list[float]]:
    # A garbage collection of the generator would change how many calls arrive together.
    gc.freeze()
    gc.disable()
    found = dict[str, list[float]]()
    with collector() as url:
        variables = environments(url)
        for number in range(options.pairs):
            order = dict(rotated(list(variables.items()), number))
            for name, seconds in run_round(order, options).items():
                found.setdefault(name, []).append(seconds)
    return found


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--pairs", type=int, default=10, help="rounds, each with new gateways")
    made.add_argument("--seconds", type=float, default=3.0, help="of calls of each gateway in one round")
    options = made.parse_args()
    options.rounds = 1
    report = Report("otel", packages=("opentelemetry-sdk",))
    with report.part("hello"):
        enter(report, run(options))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
