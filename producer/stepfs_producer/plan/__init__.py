"""Planning: which samples of which sources stand in which row of which step, as a pure function in integers.

`planner` joins the rooms in the order of a step: `schedule` (weights, lengths) → `samples` (from the cursors on) →
`mix` (draw) → `pack` (rows), `spans` → `cost`, `balance` (micro-batches and ranks) → `step` (the result) and `state`
(where the next step begins). `rules` is the plan, `order` the sequence that a source is.

No clock, no I/O, no float, no hash order: the same state and the same samples give the same step on every machine. The
names follow MegaScale-Data (arXiv 2504.09844).
"""
