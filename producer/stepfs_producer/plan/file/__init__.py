"""The plan file: one schema for YAML and Python, every error with its place, and the digest of a plan.

`yaml_file` reads text into `schema.Plan`, `checks` compares fields, `digest` fills in the
defaults, `diff` lists the changes between two plans. Only here are pydantic and PyYAML known; nothing here opens a file.
"""
