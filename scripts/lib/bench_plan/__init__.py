"""scripts/bench_plan: what planning costs, and how even, full and true to its shares the planned steps are."""
