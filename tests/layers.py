"""Pytest plugin of `scripts/test`: what each layer and the longest tests cost, printed above the closing line.

Seconds on a shared machine say little; CPU seconds, those of ended child processes too, can be compared. `--costs FILE`
lists every test. What a session's servers took stands with the last test of their process.
"""

from __future__ import annotations

import os
import resource
from collections import Counter, defaultdict
from collections.abc import Generator
from multiprocessing import forkserver
from pathlib import Path
from typing import Final

import pytest

SHOWN: Final = 25
_CPU: Final = "cpu_s"


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used) + _forked_s()


def _forked_s() -> float:
    """Of the server that forks commands (`support/forked.py`) and of those that ended; nobody else waits for them."""
    server = getattr(forkserver, "_forkserver")._forkserver_pid  # noqa: B009 (no name of it is public)
    if server is None:
        return 0.0
    fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Layers:
    def __init__(self, costs: Path | None) -> None:
        self.costs = costs
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tests: Counter[str] = Counter()
        self.test_s: defaultdict[str, float] = defaultdict(float)
        self.cpu_s: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        layer = report.nodeid.split("::")[0].rpartition("/")[0]
        self.seconds[layer] += report.duration
        self.tests[layer] += report.when == "call"
        self.test_s[report.nodeid] += report.duration
        self.cpu_s[report.nodeid] += sum(float(str(value)) for name, value in report.user_properties if name == _CPU)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.costs is not None:
            lines = [f"{self.cpu_s[test]:.3f}\t{spent:.3f}\t{test}\n" for test, spent in sorted(self.test_s.items())]
            self.costs.write_text(f"cpu_s\tseconds\ttest\n{''.join(lines)}")
        longest = sorted(self.test_s, key=self.test_s.__getitem__, reverse=True)[:SHOWN]
        share = sum(map(self.test_s.__getitem__, longest)) / max(sum(self.test_s.values()), 1e-9)
        terminalreporter.section(f"the {len(longest)} longest tests: {share:.0%} of all seconds")
        for test in longest:
            terminalreporter.write_line(f"{self.test_s[test]:7.1f} s {self.cpu_s[test]:7.1f} s of CPU  {test}")
        terminalreporter.section("layers")
        for layer in sorted(self.seconds):
            cpu_s = sum(spent for test, spent in self.cpu_s.items() if test.startswith(f"{layer}/"))
            terminalreporter.write_line(
                f"{layer:28}{self.tests[layer]:6} tests{self.seconds[layer]:9.1f} s{cpu_s:9.1f} s of CPU"
            )


class Cpu:
    """Runs where the tests run, in every process of xdist: hands the CPU seconds of each phase to its report."""

    def __init__(self) -> None:
        self.before_s = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self.before_s = _cpu_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = _cpu_s()
        report.user_properties = [(_CPU, f"{now_s - self.before_s:.3f}")]
        self.before_s = now_s
        return report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, metavar="FILE", help="write what each test cost, as TSV")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Layers(config.getoption("costs")), "layer-costs")
    config.pluginmanager.register(Cpu(), "layer-cpu")
