"""Planning: which samples of which sources stand in which row of which step, as a pure function in integers.

`planner` joins the rooms in the order of a step: `draw` (weights, lengths), `samples`, `pack` (rows), `cost`, `balance`
(micro-batches and ranks), `step` (the result and the state behind it). The same state and the same samples give the same
step on every machine. The names follow MegaScale-Data (arXiv 2504.09844).
"""
