"""Doubles of the world below stepfs: a store in virtual time that fails on purpose, and wall time under a virtual clock."""
