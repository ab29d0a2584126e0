"""Workers: `tasks` says what an engine does and repeats tasks, `local` is one of processes, `ray` one of a cluster."""
