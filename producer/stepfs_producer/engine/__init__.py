"""Workers: `api` is the face of an engine, `local` one of processes, `ray` one of a cluster; `failover` repeats tasks."""
