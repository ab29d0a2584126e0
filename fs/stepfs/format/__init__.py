"""Bytes ↔ values: no I/O, no clock, no kernel. `fs/FORMAT.md` describes the formats."""
