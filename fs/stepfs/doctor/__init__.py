"""Diagnosis: checks of the machine, its mounts and a lake, each with a remedy."""
