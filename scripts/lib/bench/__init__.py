"""What the benchmarks share: servers and mounts, the machine, tables and plots, a slow store."""
