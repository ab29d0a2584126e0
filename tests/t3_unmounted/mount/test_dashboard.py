"""The dashboard and the alert rules ask only for what a mount or a run exports."""

from __future__ import annotations

import errno
import json
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from fakemount import FACTS
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import INF

from stepfs._internal import scrape
from stepfs._internal.histogram import SECONDS, Histogram
from stepfs.data.counters import DataCounts
from stepfs.data.waiting import Cause as WaitCause
from stepfs.errors import RefusedError
from stepfs.mount import metrics
from stepfs.mount.fuse.guard import Meter
from stepfs.store.api import Counts
from stepfs_producer.plan.step import SourceState, State
from stepfs_producer.run import metrics as plan_metrics
from stepfs_producer.run.bottleneck import Cause, Waits
from stepfs_producer.run.results import PlanTotals

DASHBOARD = json.loads(
    (Path(__file__).parents[3] / "scripts/deploy/grafana-dashboard.json").read_text(encoding="utf-8")
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SCRAPED = {"instance", "job"}  # labels that Prometheus adds


def registry():
    meter = Meter()
    meter.done("read", (1,), 0.5, errno.EIO)
    collector = metrics.MountCollector(
        meter, Counts(), DataCounts(), lambda: FACTS,
        {(what, WaitCause.STORE): Histogram() for what in ("commit", "index")}, Histogram(), {"lake_id": "0" * 32, "group": "g"},
    )  # fmt: skip
    return metrics.registry_of(collector)


def registry_of_a_run():
    waits = Waits()
    waits.note(Cause.SOURCE, 1.0, "code")
    state = State("0" * 32, 0, {"code": SourceState("0" * 32, "0" * 32)})
    loader = SimpleNamespace(held=SimpleNamespace(tokens=1, nbytes=1), block_bytes=1)
    pipeline = SimpleNamespace(
        loaders={"code": loader}, waits=waits, tasks=SimpleNamespace(late=1, lost=1, seconds=2.0, workers=2)
    )
    found = CollectorRegistry()
    found.register(
        plan_metrics.PlanMetrics({}, PlanTotals(state, state), pipeline, SimpleNamespace(died=0, kept_bytes=1), 1)
    )
    return found


def exported() -> dict[str, set[str]]:
    """Sample name → its labels."""
    text = metrics.render(registry()) + metrics.render(registry_of_a_run())
    return {s.name: set(s.labels) for family in text_string_to_metric_families(text) for s in family.samples}


def asked(expression: str) -> dict[str, set[str]]:
    """Metric → labels it is selected by."""
    return {
        name: set(re.findall(r"(\w+)\s*[=!]~?\"", selector))
        for name, selector in re.findall(r"\b(stepfs_\w+)\b(?:\{([^}]*)\})?", expression)
    }


def labels_left(expression: str) -> set[str]:
    """Of an expression that asks for what is exported: a counter is rated, a histogram's buckets go through a quantile, a
    gauge is shown as it is.
    """
    known, wanted = exported(), asked(expression)
    assert wanted
    for name, labels in wanted.items():
        assert name in known, f"nothing exports {name}"
        assert labels <= known[name] | SCRAPED
        rated = re.search(rf"\b(rate|increase)\({name}\b", expression) is not None
        assert name.endswith(("_total", "_bucket", "_sum")) == rated
        assert name.endswith("_bucket") == ("histogram_quantile" in expression)
    available = set.union(*(known[name] for name in wanted)) | SCRAPED
    grouped = {label.strip() for by in re.findall(r"\bby \(([^)]*)\)", expression) for label in by.split(",")}
    assert grouped <= available
    return grouped or available


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_asks_for_what_exists(panel):
    for target in panel["targets"]:
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels_left(target["expr"])


def test_the_variables_of_the_dashboard_exist():
    known = exported()
    queries = [v["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    names = {"datasource", *(v["name"] for v in DASHBOARD["templating"]["list"])}
    for query in queries:
        metric, label = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", query).groups()
        assert label in known[metric] | SCRAPED
    used = set(re.findall(r"\$(\w+)", json.dumps(DASHBOARD)))
    assert {name for name in used if not name.startswith("__")} <= names


def test_the_scrape_port_answers_and_is_free_again_afterwards():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/metrics"
    with scrape.served(port, registry()):
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert "text/plain" in answer.headers["Content-Type"]
            names = {f.name for f in text_string_to_metric_families(answer.read().decode())}
        assert {"stepfs_requests", "stepfs_fetch_seconds", "stepfs_frontier_step"} <= names
        with pytest.raises(RefusedError, match="choose another port"), scrape.served(port, registry()):
            pass
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=20)


def test_a_histogram_counts_each_observation_once():
    histogram = Histogram()
    for value in (0.0, SECONDS[0], SECONDS[0] * 1.01, SECONDS[-1], SECONDS[-1] * 2):
        histogram.observe(value)
    assert list(histogram.cumulative())[:2] == [2, 3]
    assert list(histogram.cumulative())[-2:] == [4, 5]
    assert histogram.count == 5
    assert list(SECONDS) == sorted(SECONDS)


RULES_FILE = Path(__file__).parents[3] / "scripts/deploy/prometheus-rules.yaml"
GROUPS = yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
DURATION = re.compile(r"[1-9]\d*[smh]")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_asks_for_what_exists(rule):
    expression = rule["expr"]
    left = labels_left(expression)
    assert all(DURATION.fullmatch(range_) for range_ in re.findall(r"\[([^\]]*)\]", expression))
    assert expression.count("(") == expression.count(")")
    assert re.search(r"(==|>|<) [0-9.]+$", expression), "compared with a number"
    shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert "instance" in shown <= left


def test_the_check_finds_a_metric_that_nobody_exports():
    rule = {**RULES[0], "expr": "stepfs_store_upp == 0"}
    with pytest.raises(AssertionError, match="nothing exports stepfs_store_upp"):
        test_a_rule_asks_for_what_exists(rule)


def test_thresholds_on_a_quantile_lie_inside_the_histogram():
    """Beyond the greatest bound a quantile never rises, so that such an alert would never fire."""
    from stepfs._internal.histogram import SECONDS  # noqa: PLC0415

    for rule in RULES:
        if "histogram_quantile" in rule["expr"]:
            assert float(rule["expr"].rpartition(" ")[2]) < max(bound for bound in SECONDS if bound != INF)
