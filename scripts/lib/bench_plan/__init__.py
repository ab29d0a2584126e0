"""scripts/bench_plan: what planning costs, and a run of a plan."""
