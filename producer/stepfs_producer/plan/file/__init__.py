"""The plan file, for YAML and Python. Only here are pydantic and PyYAML known; nothing here opens a file."""
