"""The Prometheus alert rules ask only for what a mount exports, and say what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.utils import INF
from test_dashboard import SCRAPED, asked, exported

RULES_FILE = Path(__file__).parents[3] / "scripts/deploy/prometheus-rules.yaml"
GROUPS = yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
DURATION = re.compile(r"[1-9]\d*[smh]")


def test_the_file_has_the_shape_prometheus_wants():
    assert set(yaml.safe_load(RULES_FILE.read_text())) == {"groups"}
    assert [group["name"] for group in GROUPS] == ["stepfs"]
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names)) >= 5
    for rule in RULES:
        assert {"alert", "expr", "labels", "annotations"} <= set(rule) <= {
            "alert", "expr", "for", "labels", "annotations",
        }  # fmt: skip
        assert "for" not in rule or DURATION.fullmatch(rule["for"])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_asks_for_what_exists(rule):
    known, expression = exported(), rule["expr"]
    wanted = asked(expression)
    assert wanted
    for name, labels in wanted.items():
        assert name in known, f"no mount exports {name}"
        assert labels <= known[name] | SCRAPED
        # A counter is rated, a histogram's buckets go through a quantile, a gauge is compared as it is.
        rated = re.search(rf"\b(rate|increase)\({name}\b", expression) is not None
        assert name.endswith(("_total", "_bucket")) == rated
        assert name.endswith("_bucket") == ("histogram_quantile" in expression)
    assert all(DURATION.fullmatch(range_) for range_ in re.findall(r"\[([^\]]*)\]", expression))
    assert expression.count("(") == expression.count(")")
    assert re.search(r"(==|>|<) [0-9.]+$", expression), "compared with a number"
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    available = set.union(*(known[name] for name in wanted)) | SCRAPED
    left = {label.strip() for by in grouped for label in by.split(",")} or available
    assert left <= available
    shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert "instance" in shown <= left


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_says_how_bad_it_is_and_where_to_look(rule):
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert set(rule["annotations"]) == {"summary", "description"}
    assert re.search(r"`stepfs|[Ll]og|[Ll]ook", rule["annotations"]["description"])


def test_the_check_finds_a_metric_that_nobody_exports():
    rule = {**RULES[0], "expr": "stepfs_store_upp == 0"}
    with pytest.raises(AssertionError, match="no mount exports stepfs_store_upp"):
        test_a_rule_asks_for_what_exists(rule)


def test_thresholds_on_a_quantile_lie_inside_the_histogram():
    """Beyond the greatest bound a quantile never rises, so that such an alert would never fire."""
    from stepfs.histogram import SECONDS  # noqa: PLC0415

    for rule in RULES:
        if "histogram_quantile" in rule["expr"]:
            assert float(rule["expr"].rpartition(" ")[2]) < max(bound for bound in SECONDS if bound != INF)
