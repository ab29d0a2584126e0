"""Sweeps the simulator of `tests` over seeds, or replays one."""
