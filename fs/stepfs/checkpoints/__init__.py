"""Checkpoints of the trainer as they appear on disk: found, counted in steps, and recorded in the lake."""
