"""Cached slices, in memory and on disk: budget, eviction order, write-behind."""
