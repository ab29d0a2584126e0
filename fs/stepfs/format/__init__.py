"""Bytes ↔ values: no I/O, no clock, no kernel. `fs/FORMAT.md` is the prose of this room."""
