"""Memory of a run: `bounds` what each purpose may have, `step_room` that of steps under way."""
