"""Metrics: what is counted, read back as Prometheus would read it."""

import asyncio
import os
import shutil
import subprocess

import pytest
from pilotflame.errors import (
    DeadlineExceeded,
    HandlerFailed,
    InputInvalid,
    InputTooLarge,
    JobStoreFailed,
    Overloaded,
    PilotflameError,
    QueueFull,
    QuotaExceeded,
)
from pilotflame.runtime.ground.telemetry.exposition import MOST_SERIES, SLICE_SAMPLES
from pilotflame.runtime.ground.telemetry.invocation_end import InvocationEnd
from pilotflame.runtime.ground.telemetry.metrics import Metrics, Reading, WorkerCounts
from pilotflame.runtime.ground.telemetry.snapshot_metrics import SnapshotMetrics
from pilotflame.runtime.ground.telemetry.timeline import PHASES, WARM_PHASES, Activation, Timeline
from prometheus_client.parser import text_string_to_metric_families


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return samples(metrics).get((name, tuple(sorted(labels.items()))))


WARM = Timeline(1.0, sent_s=1.5, completed_s=3.0, responded_s=3.5, wait_s=0.5, exec_s=1.0, batch=4)


def ended(timeline: Timeline, error: PilotflameError | None = None, function: str = "tone") -> InvocationEnd:
    return InvocationEnd(function, "r1", "q1", "http", timeline, error)


def test_an_empty_gateway_has_an_exposition_too() -> None:
    assert all(not dict(labels).get("function") for _, labels in samples(Metrics(dict)))


def test_responses_are_counted_by_function_and_code() -> None:
    metrics = Metrics(dict)
    metrics.ended(ended(WARM))
    metrics.ended(ended(WARM))
    metrics.ended(ended(WARM, InputInvalid("no")))
    metrics.refused("other", QueueFull("full"))
    assert value(metrics, "pilotflame_invocations_total", function="tone", code="200", source="http") == 2
    assert value(metrics, "pilotflame_invocations_total", function="tone", code="422", source="http") == 1
    assert value(metrics, "pilotflame_invocations_total", function="other", code="429", source="http") == 1
    assert value(metrics, "pilotflame_invocation_seconds_sum", function="tone") == pytest.approx(7.5)
    assert not value(metrics, "pilotflame_invocation_seconds_count", function="other")
    assert value(metrics, "pilotflame_batch_size_sum", function="tone") == 12


def test_an_invocation_without_a_result_has_no_batch() -> None:
    metrics = Metrics(dict)
    metrics.ended(ended(Timeline(1.0, responded_s=2.0), Overloaded("late")))
    assert not value(metrics, "pilotflame_batch_size_count", function="tone")


def test_cold_starts_have_their_phases_and_warm_calls_none() -> None:
    metrics = Metrics(dict)
    metrics.ended(ended(WARM))
    assert value(metrics, "pilotflame_cold_start_phase_seconds_count", function="tone", phase="exec") is None
    cold = Timeline(
        1.0, sent_s=5.0, completed_s=6.0, responded_s=6.0, exec_s=1.0, activation=Activation(1.5, 2.0, 4.0)
    )
    metrics.ended(ended(cold))
    for phase, seconds in cold.phases().items():
        found = value(metrics, "pilotflame_cold_start_phase_seconds_sum", function="tone", phase=phase)
        assert found == pytest.approx(seconds)
    assert set(cold.phases()) == set(PHASES)


def test_a_deleted_function_has_no_time_series_left() -> None:
    metrics = Metrics(dict)
    for name in ("stays", "goes"):
        metrics.ended(ended(WARM, function=name))
        metrics.activated(name, "ready")
    metrics.forget("goes")
    metrics.forget("never was")
    assert "goes" not in metrics.text().decode()
    assert value(metrics, "pilotflame_invocations_total", function="stays", code="200", source="http") == 1


def test_failures_of_background_tasks_are_counted_by_task() -> None:
    metrics = Metrics(dict, {"webhooks": 2})
    assert value(metrics, "pilotflame_background_failures_total", task="webhooks") == 2


def test_activations_are_counted_by_outcome() -> None:
    metrics = Metrics(dict)
    metrics.activated("tone", "ready")
    metrics.activated("tone", "failed")
    metrics.activated("tone", "ready")
    assert value(metrics, "pilotflame_activations_total", function="tone", outcome="ready") == 2
    assert value(metrics, "pilotflame_activations_total", function="tone", outcome="failed") == 1


def test_workers_are_counted_when_scraped() -> None:
    worker_counts: dict[str, WorkerCounts] = {}
    metrics = Metrics(lambda: worker_counts)
    worker_counts["tone"] = WorkerCounts(queued=3, in_flight=2, starting=1, ready=4, draining=5)
    for state, count in (("starting", 1), ("ready", 4), ("draining", 5)):
        assert value(metrics, "pilotflame_workers", function="tone", state=state) == count
    assert value(metrics, "pilotflame_queued", function="tone") == 3
    assert value(metrics, "pilotflame_in_flight", function="tone") == 2
    del worker_counts["tone"]
    assert value(metrics, "pilotflame_queued", function="tone") is None


def test_two_gateways_in_one_process_do_not_mix() -> None:
    one, other = Metrics(dict), Metrics(dict)
    one.refused("tone", QueueFull("full"))
    assert value(other, "pilotflame_invocations_total", function="tone", code="429", source="http") is None


def test_buckets_hold_what_is_at_most_their_bound() -> None:
    metrics = Metrics(dict)
    metrics.ended(ended(Timeline(1.0, completed_s=1.0, responded_s=1.05)))
    assert value(metrics, "pilotflame_invocation_seconds_bucket", function="tone", le="0.025") == 0
    assert value(metrics, "pilotflame_invocation_seconds_bucket", function="tone", le="0.1") == 1
    assert value(metrics, "pilotflame_invocation_seconds_bucket", function="tone", le="+Inf") == 1


def test_phases_have_the_names_of_server_timing() -> None:
    metrics = Metrics(dict)
    metrics.ended(ended(WARM))
    # No worker got this invocation, so it counts in the phase "queue" only.
    metrics.ended(ended(Timeline(1.0, responded_s=3.0), Overloaded("late")))
    assert list(WARM.phases()) == list(WARM_PHASES)
    for phase, seconds, count in (
        ("queue", 2.5, 2), ("link", 0.0, 1), ("wait", 0.5, 1), ("exec", 1.0, 1), ("respond", 0.5, 1),
    ):  # fmt: skip
        found = value(metrics, "pilotflame_phase_seconds_sum", function="tone", phase=phase)
        assert found == pytest.approx(seconds)
        assert value(metrics, "pilotflame_phase_seconds_count", function="tone", phase=phase) == count


def test_refusals_and_failures_are_counted_by_the_code_of_their_error() -> None:
    metrics = Metrics(dict)
    queued = Timeline(1.0, responded_s=2.0)
    metrics.refused("tone", QueueFull("full"))
    metrics.refused("tone", InputTooLarge("much"))
    metrics.turned_away("tone", QuotaExceeded("used up"))
    metrics.ended(ended(queued, DeadlineExceeded("late")))
    # A worker returned this invocation unstarted, so it counts as a refusal.
    metrics.ended(ended(WARM, Overloaded("late")))
    metrics.ended(ended(WARM, DeadlineExceeded("late")))
    metrics.ended(ended(WARM, HandlerFailed("no")))
    for reason, count in (
        ("queue_full", 1), ("input_too_large", 1), ("quota_exceeded", 1), ("deadline_exceeded", 1), ("overloaded", 1),
        ("handler_failed", None),
    ):  # fmt: skip
        assert value(metrics, "pilotflame_refusals_total", function="tone", reason=reason) == count
    for error, count in (("deadline_exceeded", 1), ("handler_failed", 1), ("overloaded", None)):
        assert value(metrics, "pilotflame_failures_total", function="tone", error=error) == count
    # The request that exceeded a quota is not counted. It never reached its route, which may not be a route of invocations.
    assert value(metrics, "pilotflame_invocations_total", function="tone", code="429", source="http") == 1


def test_how_busy_workers_were() -> None:
    worker_counts = {"tone": WorkerCounts(busy_s=3.0, ready_s=12.0), "new": WorkerCounts()}
    metrics = Metrics(lambda: worker_counts)
    assert value(metrics, "pilotflame_worker_busy_seconds_total", function="tone") == 3
    assert value(metrics, "pilotflame_worker_ready_seconds_total", function="tone") == 12
    assert value(metrics, "pilotflame_worker_busy_ratio", function="tone") == 0.25
    assert value(metrics, "pilotflame_worker_busy_ratio", function="new") == 0


def snapshot_metrics() -> SnapshotMetrics:
    made = SnapshotMetrics()
    made.began()
    made.began()
    made.ended("failed")
    counts = {
        "received_bytes": 5,
        "verified_bytes": 4,
        "evicted_bytes": 3,
        "spare_bytes": 4,
        "used_bytes": 2,
        "budget_bytes": 9,
    }
    made.on_tiers([{"kind": "tmpfs", **counts}, {"kind": "disk", **counts}])
    return made


def test_fetches_and_the_tiers_of_the_cache_are_exported() -> None:
    metrics = Metrics(dict, others=[snapshot_metrics().readings])
    assert value(metrics, "pilotflame_snapshot_fetches_under_way") == 1
    assert value(metrics, "pilotflame_snapshot_fetches_total", outcome="failed") == 1
    assert value(metrics, "pilotflame_snapshot_received_bytes_total", tier="memory") == 5
    assert value(metrics, "pilotflame_snapshot_evicted_bytes_total", tier="disk") == 3
    assert value(metrics, "pilotflame_snapshot_cache_spare_bytes", tier="memory") == 4
    assert value(metrics, "pilotflame_snapshot_cache_budget_bytes", tier="disk") == 9


async def test_readings_of_other_parts_are_exported_and_a_failing_one_is_left_out() -> None:
    scrapes: list[str] = []

    def worker_counts() -> dict[str, WorkerCounts]:
        scrapes.append("worker_counts")
        return {"tone": WorkerCounts()}

    metrics = Metrics(worker_counts)
    rows = {("tone", "completed"): 3.0, ("deleted", "completed"): 4.0}

    async def read() -> list[Reading]:
        return [
            Reading("jobs_ended", "Ended.", rows, ("function", "state"), total=True),
            Reading("keys_running", "All.", {(): 2.0}, ()),
        ]

    async def broken() -> list[Reading]:
        raise JobStoreFailed("The disk is full.")

    metrics.readers += [read, broken]
    text = (await metrics.read()).decode()
    assert 'pilotflame_jobs_ended_total{function="tone",state="completed"} 3.0' in text
    assert "pilotflame_keys_running 2.0" in text
    assert "deleted" not in text
    assert len(scrapes) == 1


async def test_a_text_leaves_the_event_loop_to_others_and_callers_share_it() -> None:
    metrics, texts = Metrics(dict), 0
    for number in range(40):
        metrics.ended(ended(WARM, function=f"f{number}"))

    async def counted() -> list[Reading]:
        nonlocal texts
        texts += 1
        return []

    metrics.readers.append(counted)
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    ticking = asyncio.create_task(tick())
    found = await asyncio.gather(*(metrics.read() for _ in range(5)))
    ticking.cancel()
    assert (len(set(found)), texts) == (1, 1)
    assert found[0] == metrics.text()
    assert turns > len(found[0].splitlines()) / (2 * SLICE_SAMPLES)
    await metrics.read()
    assert texts == 2


async def test_a_caller_who_goes_ends_no_other_caller_s_text() -> None:
    metrics = Metrics(dict)
    metrics.ended(ended(WARM))
    gone, stays = (asyncio.create_task(metrics.read()) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    assert await stays == metrics.text()


def test_a_function_has_a_limit_of_series() -> None:
    metrics = Metrics(lambda: {"tone": WorkerCounts(), "other": WorkerCounts()})
    chosen = {("tone", f"by a caller {number}"): 1.0 for number in range(MOST_SERIES + 7)}
    found = metrics.text(
        [Reading("values", "Values.", chosen | {("other", "one"): 2.0}, ("function", "field"))]
    )
    assert found.count(b"\npilotflame_values{") == MOST_SERIES + 1
    assert b'pilotflame_values{field="one",function="other"} 2.0' in found
    assert b'pilotflame_series_left_out{function="tone"} 7.0' in found


def test_a_function_has_few_series() -> None:
    def lines(functions: int) -> int:
        metrics = Metrics(lambda: {f"f{number}": WorkerCounts() for number in range(functions)})
        cold = Timeline(1.0, 5.0, 6.0, 6.0, exec_s=1.0, activation=Activation(1.5, 2.0, 4.0))
        for number in range(functions):
            metrics.ended(ended(cold, function=f"f{number}"))
        return len(metrics.text().splitlines())

    assert lines(11) - lines(1) <= 10 * 110


PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool") or ""


@pytest.mark.skipif(
    not os.access(PROMTOOL, os.X_OK), reason="promtool is not here; .ci/run fetches it (PROMTOOL)"
)
def test_promtool_accepts_the_exposition() -> None:
    worker_counts = {"tone": WorkerCounts(1, 2, 3, 4, 5, 6.0, 7.0)}
    metrics = Metrics(lambda: worker_counts, others=[snapshot_metrics().readings])
    metrics.ended(ended(WARM))
    cold = Timeline(1.0, 5.0, 6.0, 6.0, exec_s=1.0, activation=Activation(1.5, 2.0, 4.0))
    metrics.ended(ended(cold))
    metrics.refused("tone", QueueFull("full"))
    metrics.activated("tone", "ready")
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=metrics.text(), capture_output=True, check=False, timeout=60)  # fmt: skip
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
