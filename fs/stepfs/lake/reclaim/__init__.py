"""Reclaiming: plan → verify → raise the floor → delete. Nothing here ever guesses from a clock or a lease."""
