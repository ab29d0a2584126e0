"""Planned runs whose workers, command and store are killed at random, beside a run that nobody disturbs."""
