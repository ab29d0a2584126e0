"""What the benchmarks share: servers and mounts, the machine, tables, a slow store."""
