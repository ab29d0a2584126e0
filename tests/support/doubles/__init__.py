"""Doubles of what stepfs runs on: a store in virtual time that fails on purpose, and wall time under a virtual clock."""
