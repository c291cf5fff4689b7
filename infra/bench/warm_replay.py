"""`make bench-warm`, a recorded hour of arrivals, faster: the share of requests that is answered on time.

data/azure-llm-2023-conv.csv.gz has the arrivals (data/README.md names their source). The beginning of the hour is taken,
as many arrivals as the rate and the time ask for, and their times are scaled so that their mean rate is the one asked
for; bursts and lulls keep their shape. A simulation (replay.py) is given the very same instants.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import json
import tempfile
from pathlib import Path

from http1 import Request
from load import Tally, load_apart
from warm_open import with_deadline

TRACE = Path(__file__).with_name("data") / "azure-llm-2023-conv.csv.gz"


def trace_s(path: Path = TRACE) -> list[float]:
    """When each request of the trace came, in seconds after the first."""
    with gzip.open(path, "rt") as file:
        stamps = [row["TIMESTAMP"] for row in csv.DictReader(file)]
    # The stamps have seven decimals; Python reads only six.
    times = [datetime.datetime.fromisoformat(stamp[:26]).timestamp() for stamp in stamps]
    return [time - times[0] for time in times]


def instants_ns(rate: float, for_s: float, path: Path = TRACE) -> list[int]:
    """The arrivals scaled to a mean rate, of `for_s` or of the whole trace, whichever is shorter; ns after the start."""
    times = trace_s(path)
    times = times[: max(2, min(len(times), int(rate * for_s)))]
    scale = (len(times) / rate) / times[-1]
    return [int(time * scale * 1e9) for time in times]


def replay(request: Request, instants: list[int], deadline_s: float) -> Tally:
    """The arrivals, live: an open loop. `Tally.on_time(deadline_s)` is the share."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(instants, file)
        file.flush()
        return load_apart(with_deadline(request, deadline_s), instants=Path(file.name), timeout_s=240)
