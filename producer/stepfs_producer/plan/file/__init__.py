"""The plan file: one schema for YAML and Python, every error with its place, and what of a plan makes its digest.

`yaml_file` reads text into `schema.Plan`, `checks` are what no field can see alone, `digest` says what a plan is once its
defaults are filled in, `diff` what changed between two. Only here are pydantic and PyYAML known; nothing here opens a file.
"""
