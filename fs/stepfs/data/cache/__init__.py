"""Slices at hand, in memory and on disk: budget, eviction order, write-behind."""
