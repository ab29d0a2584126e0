"""Memory of a run: its `bounds` by purpose, and the `step_room` of steps under way."""
