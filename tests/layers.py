"""Pytest plugin of `scripts/test`: what each layer costs, printed above the closing line."""

from __future__ import annotations

from collections import defaultdict

import pytest


class Layers:
    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tests: defaultdict[str, int] = defaultdict(int)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        layer = report.nodeid.split("::")[0].rpartition("/")[0]
        self.seconds[layer] += report.duration
        self.tests[layer] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("layers")
        for layer in sorted(self.seconds):
            terminalreporter.write_line(f"{layer:28}{self.tests[layer]:6} tests{self.seconds[layer]:9.1f} s")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Layers(), "layer-costs")
