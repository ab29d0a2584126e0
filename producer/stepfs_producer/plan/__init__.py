"""Planning: which bytes of which sources stand in which slice of which step.

A plan is a pure function of its sources and a position: the same position always yields the same remaining stream,
so a producer that is killed continues from the last committed position without a gap or a repetition. Rooms, in
the order data flows: `source` → `tokenize` → `pack` → `construct` → `payload`, joined in `text`. The names follow
MegaScale-Data (arXiv 2504.09844): source loaders, data constructors, a planner on top.
"""
