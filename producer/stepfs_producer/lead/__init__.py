"""Waiting for trainers that are behind, and for reclaim: `max_lead` and `max_live_bytes`."""
