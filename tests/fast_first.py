"""A plugin of pytest: names failures as they occur, and leaves out the slowest tests if a run may take only some seconds."""

from __future__ import annotations

from typing import Any

import pytest

DURATIONS = "pilotflame/durations"
# The assumed duration of a test that has not run yet.
UNKNOWN_S = 0.5


class FastFirst:
    """Remembers how long each test takes, in pytest's cache."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._took_s = config, dict[str, float]()
        # Pytest may run without its cache (-p no:cacheprovider).
        self._cache: Any = getattr(config, "cache", None)
        self.budget_s: float | None = config.getoption("budget_s")
        self._left_out = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the fastest tests that fit into the budget together."""
        if self.budget_s is None or self._cache is None:
            return
        known: dict[str, float] = self._cache.get(DURATIONS, {})
        spent_s, kept = 0.0, set[str]()
        for item in sorted(items, key=lambda item: known.get(item.nodeid, UNKNOWN_S)):
            spent_s += known.get(item.nodeid, UNKNOWN_S)
            if spent_s > self.budget_s:
                break
            kept.add(item.nodeid)
        self._left_out = len(items) - len(kept)
        items[:] = [item for item in items if item.nodeid in kept]
        if hasattr(self._config, "workerinput"):
            self._config.workeroutput["left_out"] = self._left_out  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took_s[report.nodeid] = self._took_s.get(report.nodeid, 0.0) + report.duration
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message.partition("\n")[0] if crash is not None else report.when
            reporter.write_line(f"\nFAILED {report.nodeid}: {why}", red=True)

    def pytest_sessionfinish(self) -> None:
        # Each process of xdist only reports its durations to the main process, which writes the cache.
        if self._cache is None or hasattr(self._config, "workerinput"):
            return
        known = self._cache.get(DURATIONS, {})
        self._cache.set(DURATIONS, known | {name: round(s, 3) for name, s in self._took_s.items()})

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the number of omitted tests from a process of xdist that has ended. All processes omit the
        same tests.
        """
        self._left_out = max(self._left_out, getattr(node, "workeroutput", {}).get("left_out", 0))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._left_out:
            text = f"{self._left_out} slow tests were left out: they did not fit into {self.budget_s:.0f} s"
            terminalreporter.write_line(text)


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "run the fastest tests that together take at most this many seconds"
    parser.addoption("--budget-s", type=float, default=None, help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FastFirst(config), "fast-first-runs")
