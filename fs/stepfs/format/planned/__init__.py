"""The facts of a planned producer in its lake: its position in commits, and the frozen listings of its sources."""
