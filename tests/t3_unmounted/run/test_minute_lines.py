"""Progress of a run whose output goes to a log: one line a minute."""

from __future__ import annotations

from types import SimpleNamespace

from stepfs_producer.cli import reports


def test_a_run_without_a_terminal_says_once_a_minute_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr("stepfs.cli.failure._running", "stepfs-produce")  # as the command does, whoever ran here before
    now = [0.0]
    monkeypatch.setattr("stepfs_producer.cli.reports.time.monotonic", lambda: now[0])
    totals = SimpleNamespace(
        steps=0,
        state=SimpleNamespace(step=100),
        sources=lambda: {"web": {"share": 0.75}, "code": {"share": 0.25}},
        pace=lambda: "; bottleneck web (1.8 of 2 workers wanted); lead 40 steps",
    )
    with reports.showing_plan("plan", 1000) as show:
        for second in range(150):
            now[0] = float(second)
            totals.steps, totals.state.step = 2 * second, 100 + 2 * second
            show(totals, {})
    first, second = capsys.readouterr().err.splitlines()
    assert first == (
        "stepfs-produce: plan: 220 steps, 2.00/s; web 75.00%, code 25.00%; bottleneck web (1.8 of 2 workers wanted); "
        "lead 40 steps"
    )
    assert second.startswith("stepfs-produce: plan: 340 steps, 2.00/s")
