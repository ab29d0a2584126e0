"""Measures of a running plan: the work of its sources, the workers that it wants, and its bottleneck."""
